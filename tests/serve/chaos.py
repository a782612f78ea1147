"""Requests in a closed loop while worker processes are killed and stopped, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

import psutil

from dbench.events import RequestArrived, RequestFinished, WorkerLost
from dbench.serve.client import Client
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Accepted, PollState, Submission
from tests.serve.server_builders import events_of, eventually

CONCURRENCY = 16
NUM_KINDS = 20
"""Different requests; every one is sent many times."""
REQUESTS_PER_FAULT = 50
LEAST_FAULTS = 8
SHARE_THAT_GOES_AWAY = 0.05
ALLOWED_ERROR = re.compile(r"block \d+ failed \d+ times, last on worker \d+: worker \d+ was lost: .+")
RULES = (
    SamplingParameters("conf_threshold", confidence_threshold=0.9),
    SamplingParameters("conf_quota", fixed_unmask_quota=2),
    SamplingParameters("random", temperature=0.7),
    SamplingParameters("entropy", entropy_threshold=0.5),
)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of serving, by the options of a server."""

    name: str
    options: Mapping[str, object]


MODES = (Mode("colocated", {"gpus": "cpu,cpu,cpu"}),)


class Fault(StrEnum):
    KILL = "kill"
    STOP = "stop"
    """For good: whoever watches it must notice."""
    PAUSE = "pause"
    """For less time than anybody should mind."""


def kinds_of_requests(draw: random.Random) -> list[Submission]:
    return [
        Submission(
            tuple(draw.randrange(3, 250) for _ in range(draw.randrange(1, 120))),
            8 * draw.randrange(1, 6),
            draw.choice(RULES),
            request_seed=number,
            ignore_eos=True,
        )
        for number in range(NUM_KINDS)
    ]


@dataclass(slots=True)
class Outcome:
    """What became of everything."""

    states: dict[str, PollState] = field(default_factory=dict)
    """Request id -> the last that its client heard; of those that went away, what a poll says."""
    kinds: dict[str, int] = field(default_factory=dict)
    gone_away: set[str] = field(default_factory=set)
    processes: set[psutil.Process] = field(default_factory=set)
    """All workers that were ever seen."""
    faults: Counter[Fault] = field(default_factory=Counter)


class Chaos:
    """One run against a server; `workers` finds the processes that may be hit at the moment."""

    def __init__(
        self, address: str, draw: random.Random, workers: Callable[[], list[psutil.Process]], num_requests: int
    ) -> None:
        self.outcome = Outcome()
        self._address = address
        self._draw = draw
        self._workers = workers
        self._num_requests = num_requests
        self._requests = kinds_of_requests(draw)
        self._num_started = 0
        self._resumes: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """All requests to their ends, with faults among them; raises AssertionError for what must not be."""
        async with Client(self._address) as client:
            wanted = [(await self._one(client, kind)).generated_token_ids for kind in range(NUM_KINDS)]
            faults = asyncio.create_task(self._strike())
            await asyncio.gather(*(self._loop(client) for _ in range(CONCURRENCY)))
            await faults
            await asyncio.gather(*self._resumes)
            await self._calm_down(client)
            await self._check_requests(client, wanted)

    # ---- the load ----

    async def _loop(self, client: Client) -> None:
        while self._num_started < self._num_requests:
            self._num_started += 1
            kind = self._draw.randrange(NUM_KINDS)
            await self._one(client, kind, goes_away=self._draw.random() < SHARE_THAT_GOES_AWAY)

    async def _one(self, client: Client, kind: int, *, goes_away: bool = False) -> PollState:
        request_id = ""
        async with aclosing(client.generate(self._requests[kind])) as replies:
            async for reply in replies:
                if isinstance(reply, Accepted):
                    request_id = reply.request_id
                    self.outcome.kinds[request_id] = kind
                    if goes_away:
                        self.outcome.gone_away.add(request_id)
                        break
                if isinstance(reply, PollState):
                    self.outcome.states[request_id] = reply
        if goes_away:
            self.outcome.states[request_id] = await self._final(client, request_id)
        return self.outcome.states[request_id]

    async def _final(self, client: Client, request_id: str) -> PollState:
        async def is_final() -> bool:
            return (await client.poll(request_id)).completion_s is not None

        await eventually(is_final)
        return await client.poll(request_id)

    # ---- the faults ----

    async def _strike(self) -> None:
        """Faults spread over the requests, each as soon as so many have ended; some come at once."""
        num_faults = max(LEAST_FAULTS, self._num_requests // REQUESTS_PER_FAULT)
        moments = sorted(self._draw.randrange(int(0.9 * self._num_requests)) for _ in range(num_faults))
        for moment in moments:
            while len(self.outcome.states) < NUM_KINDS + moment:
                await asyncio.sleep(0.01)
            await self._hit(self._draw.choice(list(Fault)))

    async def _hit(self, fault: Fault) -> None:
        while not (workers := self._workers()):
            await asyncio.sleep(0.01)
        self.outcome.processes |= set(workers)
        victim = self._draw.choice(workers)
        self.outcome.faults[fault] += 1
        try:
            victim.kill() if fault is Fault.KILL else victim.suspend()
        except psutil.NoSuchProcess:
            return
        if fault is Fault.PAUSE:
            self._resumes.append(asyncio.create_task(_resume(victim, self._draw.uniform(0.1, 1.0))))

    # ---- afterwards ----

    async def _calm_down(self, client: Client) -> None:
        """All workers come back, and hold nothing."""

        async def is_calm() -> bool:
            status = await client.status()
            self.outcome.processes |= set(self._workers())
            return all(
                worker.ready and not worker.pages_used and not worker.outstanding_prefill_tokens
                for worker in status.workers
            )

        await eventually(is_calm)
        assert (await client.status()).num_requests_in_server == 0

    async def _check_requests(self, client: Client, wanted: list[tuple[int, ...]]) -> None:
        states, kinds = self.outcome.states, self.outcome.kinds
        assert len(states) == NUM_KINDS + self._num_requests
        for request_id, state in states.items():
            assert await client.poll(request_id) == state
            if state.status == "COMPLETED":
                assert state.generated_token_ids == wanted[kinds[request_id]]
            elif state.status == "ERROR":
                assert ALLOWED_ERROR.fullmatch(state.error_message), state.error_message
            else:
                assert (state.status, request_id in self.outcome.gone_away) == ("CANCELLED", True)
        events = await events_of(client)
        arrived = Counter(e.request_id for e in events if isinstance(e, RequestArrived))
        finished = Counter(e.request_id for e in events if isinstance(e, RequestFinished))
        assert arrived == finished == Counter(dict.fromkeys(states, 1))
        assert sum(isinstance(e, WorkerLost) for e in events) >= self.outcome.faults[Fault.KILL]


async def _resume(process: psutil.Process, after_s: float) -> None:
    await asyncio.sleep(after_s)
    try:
        process.resume()
    except psutil.NoSuchProcess:
        return
