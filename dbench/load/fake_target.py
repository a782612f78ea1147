"""Targets without a server: one that follows a script, one that answers at once.

Both satisfy the Target protocol; they serve searches over a known system, and the measurement of the
load generator's own speed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from dbench.errors import ServerUnavailable
from dbench.events import (
    BlockFinished,
    BlockRouted,
    Event,
    RequestArrived,
    RequestFinished,
    SchedulerDepth,
    WorkerState,
)
from dbench.load.target import CANCELLED, COMPLETED, ERROR, LoadRequest, Outcome, TargetInfo
from dbench.progress import WorkerProgress

FAKE_INFO = TargetInfo(
    model="fake",
    version="0",
    block_length=32,
    max_gen_len=None,
    max_model_len=4096,
    vocabulary_size=256,
    reserved_token_ids=frozenset({0, 1}),
    num_workers=1,
    resolved_config_json="{}",
    environment_json="{}",
    tokenizer="embedded",
)

PASSES_PER_BLOCK = 2
"""A refresh and one decode step, of equal time."""


def no_time(request: LoadRequest) -> float:
    """A service time of 0."""
    return 0.0


def no_error(request: LoadRequest) -> str:
    """Every request completes."""
    return ""


@dataclass(frozen=True, slots=True)
class Script:
    """How a scripted target behaves."""

    service_time: Callable[[LoadRequest], float] = no_time
    """Seconds from the start of work to the result; waiting for a server comes on top."""
    num_servers: int = 1
    """Requests worked on at a time; the others wait in the order of their arrival."""
    error: Callable[[LoadRequest], str] = no_error
    """One line for a request that ends as ERROR after its service time; empty for one that completes."""
    lost_at: int | None = None
    """The target goes away when it has accepted this many requests since it was made."""


class InProcessTarget:
    """A first-come-first-served queue in this process, with the events of a server that has as many workers.

    The ids of an answer depend on the request's seed and gen_length alone.
    """

    def __init__(self, script: Script, info: TargetInfo = FAKE_INFO) -> None:
        self.script = script
        self._info = info
        self._events: list[Event] = []
        self._free = deque(range(script.num_servers))
        self._a_server = asyncio.Semaphore(script.num_servers)
        self._lost = asyncio.Event()
        self._num_accepted = 0
        self._num_waiting = 0

    async def info(self) -> TargetInfo:
        self._check_reachable()
        return self._info

    async def workers(self) -> tuple[WorkerProgress, ...]:
        self._check_reachable()
        return tuple(
            WorkerProgress(
                worker_id=worker_id,
                device="fake",
                state="idle" if worker_id in self._free else "busy",
                queue_depth_waiting=0,
                queue_depth_active=int(worker_id not in self._free),
                pages_used=0,
                pages_total=0,
                num_forward_passes=0,
                num_unmasked_tokens=0,
            )
            for worker_id in range(self.script.num_servers)
        )

    async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
        self._check_reachable()
        if request.gen_length < 1 or request.gen_length % self._info.block_length:
            wanted = f"no positive multiple of block_length {self._info.block_length}"
            return Outcome("", ERROR, (), 0, None, f"gen_length {request.gen_length} is {wanted}")
        request_id = f"fake-{self._num_accepted}"
        self._num_accepted += 1
        accepted(request_id)
        num_prompt_tokens = len(request.prompt_token_ids)
        self._record(RequestArrived(_now(), "scheduler", request_id, num_prompt_tokens, request.gen_length))
        if self._num_accepted == self.script.lost_at:
            self.lose()
        try:
            outcome = await self._serve(request, request_id)
        except asyncio.CancelledError:
            self._record(RequestFinished(_now(), "scheduler", request_id, CANCELLED, 0, 0, ""))
            raise
        self._record(
            RequestFinished(
                _now(),
                "scheduler",
                request_id,
                outcome.status,
                len(outcome.token_ids),
                outcome.num_forward_passes,
                outcome.error,
            )
        )
        return outcome

    async def reset_metrics(self) -> None:
        self._check_reachable()
        self._events.clear()

    async def export_events(self) -> AsyncIterator[Event]:
        self._check_reachable()
        for event in tuple(self._events):
            yield event

    async def aclose(self) -> None:
        """Nothing to give back."""

    def lose(self) -> None:
        """Go away for good."""
        self._lost.set()

    async def _serve(self, request: LoadRequest, request_id: str) -> Outcome:
        """Wait for a server, then work block by block."""
        ready_s = _now()
        self._wait(+1)
        try:
            await self._a_server.acquire()
        finally:
            self._wait(-1)
        worker_id = self._free.popleft()
        self._set_state(worker_id, "busy")
        num_blocks = request.gen_length // self._info.block_length
        block_s = self.script.service_time(request) / num_blocks
        first_block_s = None
        try:
            for index in range(num_blocks):
                start_s = _now()
                self._record(BlockRouted(start_s, "scheduler", request_id, index, 0, worker_id))
                await self._work(block_s)
                self._record(self._block(request_id, index, worker_id, (ready_s, start_s)))
                ready_s = _now()
                first_block_s = first_block_s or ready_s
        finally:
            self._free.append(worker_id)
            self._set_state(worker_id, "idle")
            self._a_server.release()
        error = self.script.error(request)
        if error:
            return Outcome(request_id, ERROR, (), 0, first_block_s, error)
        num_passes = num_blocks * PASSES_PER_BLOCK
        return Outcome(request_id, COMPLETED, self._answer(request), num_passes, first_block_s, "")

    async def _work(self, duration_s: float) -> None:
        """Let the time pass; raises ServerUnavailable when the target goes away meanwhile."""
        if duration_s > 0:
            try:
                async with asyncio.timeout(duration_s):
                    await self._lost.wait()
            except TimeoutError:
                return
        self._check_reachable()

    def _block(self, request_id: str, index: int, worker_id: int, times: tuple[float, float]) -> BlockFinished:
        ready_s, start_s = times
        end_s = _now()
        middle_s = (start_s + end_s) / 2
        half = self._info.block_length // 2
        return BlockFinished(
            at_s=end_s,
            source="scheduler",
            request_id=request_id,
            block_index=index,
            attempt=0,
            worker_id=worker_id,
            outcome="done",
            error="",
            ready_s=ready_s,
            routed_s=start_s,
            received_s=start_s,
            refresh_start_s=start_s,
            refresh_end_s=middle_s,
            decode_start_s=middle_s,
            end_s=end_s,
            step_end_s=(middle_s, end_s),
            step_num_unmasked=(half, self._info.block_length - half),
        )

    def _answer(self, request: LoadRequest) -> tuple[int, ...]:
        ids = [i for i in range(self._info.vocabulary_size) if i not in self._info.reserved_token_ids]
        digest = hashlib.shake_128(str(request.request_seed).encode()).digest(request.gen_length)
        return tuple(ids[byte % len(ids)] for byte in digest)

    def _wait(self, change: int) -> None:
        self._num_waiting += change
        self._record(SchedulerDepth(_now(), "scheduler", self._num_waiting, 0))

    def _set_state(self, worker_id: int, state: str) -> None:
        active = int(state == "busy")
        self._record(WorkerState(_now(), f"worker-{worker_id}", worker_id, state, 0, active, 0, 0, 0, 0, 0))

    def _record(self, event: Event) -> None:
        self._events.append(event)

    def _check_reachable(self) -> None:
        if self._lost.is_set():
            raise ServerUnavailable("the fake target has gone away")


class NoopTarget:
    """Completes every request at once with no tokens: what remains is the load generator's own time."""

    def __init__(self, info: TargetInfo = FAKE_INFO) -> None:
        self._info = info
        self._num_accepted = 0

    async def info(self) -> TargetInfo:
        return self._info

    async def workers(self) -> tuple[WorkerProgress, ...]:
        return ()

    async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
        request_id = f"noop-{self._num_accepted}"
        self._num_accepted += 1
        accepted(request_id)
        return Outcome(request_id, COMPLETED, (), 0, None, "")

    async def reset_metrics(self) -> None:
        """Nothing is recorded."""

    async def export_events(self) -> AsyncIterator[Event]:
        nothing: tuple[Event, ...] = ()
        for event in nothing:
            yield event

    async def aclose(self) -> None:
        """Nothing to give back."""


def _now() -> float:
    return time.monotonic()
