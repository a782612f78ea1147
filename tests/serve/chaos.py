"""Requests in a closed loop while worker processes are killed and stopped, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import psutil

from dbench.events import Event, RequestArrived, RequestFinished, WorkerLost, WorkerUp
from dbench.serve.client import Client
from dbench.serve.launch import ServerProcess
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Accepted, PollState, Submission
from tests.serve.leftovers import Household
from tests.serve.process_builders import is_gone
from tests.serve.remote_builders import ENVIRONMENT, WorkerProcess
from tests.serve.server_builders import WORKER_KEY, events_of, eventually

CONCURRENCY = 16
NUM_KINDS = 20
"""Different requests; every one is sent many times."""
REQUESTS_PER_FAULT = 50
LEAST_FAULTS = 8
SHARE_THAT_GOES_AWAY = 0.05
ALLOWED_ERROR = re.compile(
    r"block \d+ failed \d+ times, last on worker \d+: "
    r"(worker \d+ was lost: .+|block \d+: KV transfer (to|from) worker \d+: .+)"
)
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
    num_local: int
    num_remote: int = 0
    """`dbench worker` processes that join, and that somebody starts again whenever one has ended."""

    @property
    def has_kv_links(self) -> bool:
        return self.options.get("mode") == "hybrid"


HYBRID: Mapping[str, object] = {
    "mode": "hybrid",
    "prefill_gpus": "cpu,cpu",
    "hybrid_colocated_gpus": "cpu,cpu",
    "prefill_overload_threshold": 300,
    "kv_max_pages": 40,
    "kv_transfer_timeout_s": 2.0,
}
"""So small that blocks overflow and wait for pages."""

MODES = (
    Mode("colocated", {"gpus": "cpu,cpu,cpu"}, num_local=3),
    Mode("remote", {"gpus": "cpu", "worker_key": WORKER_KEY}, num_local=1, num_remote=2),
    Mode("hybrid", HYBRID, num_local=4),
    Mode("disaggregated", {**HYBRID, "enable_hybrid_prefill_overflow": False}, num_local=4),
)
WORKER_TIMEOUT_S = 3.0


class Fault(StrEnum):
    KILL = "kill"
    STOP = "stop"
    """For longer than worker_timeout_s: a local worker is killed then, one of another host wakes up late."""
    PAUSE = "pause"
    """For less time than anybody should mind."""


MIXTURE = (Fault.KILL, Fault.STOP, Fault.KILL, Fault.PAUSE)


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
    killed: set[psutil.Process] = field(default_factory=set)
    killed_ready: set[int] = field(default_factory=set)
    """Process ids of those that were ready when they were killed: the server must report each as lost."""


class RemoteWorkers:
    """`with`: a number of `dbench worker` processes, as long as `keep` runs; they leave at the end."""

    def __init__(self, address: str, folder: Path, number: int, temporary: Path) -> None:
        self._address = address
        self._environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
        self._folder = folder
        self._number = number
        self._num_started = 0
        self._running: list[WorkerProcess] = []

    def __enter__(self) -> RemoteWorkers:
        self._fill_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._running:
            worker.process.terminate()
        codes = [worker.exit_code() for worker in self._running]
        for worker in self._running:
            worker.close()
        assert error is not None or codes == [0] * self._number

    def processes(self) -> list[psutil.Process]:
        running = [worker for worker in self._running if worker.process.poll() is None]
        return [psutil.Process(worker.pid) for worker in running]

    async def keep(self) -> None:
        while True:
            self._fill_up()
            await asyncio.sleep(0.1)

    def _fill_up(self) -> None:
        for worker in [worker for worker in self._running if worker.process.poll() is not None]:
            worker.close()
            self._running.remove(worker)
        while len(self._running) < self._number:
            self._num_started += 1
            log = self._folder / f"worker-{self._num_started}.log"
            self._running.append(WorkerProcess(self._address, log, environment=self._environment))


class Chaos:
    """One run against a server and its workers."""

    def __init__(
        self, server: ServerProcess, mode: Mode, remote: RemoteWorkers, draw: random.Random, household: Household
    ) -> None:
        self.outcome = Outcome()
        self._server = server
        self._remote = remote
        self._household = household
        self._num_workers = mode.num_local + mode.num_remote
        self._draw = draw
        self._num_requests = 0
        self._requests = kinds_of_requests(draw)
        self._num_started = 0
        self._resumes: list[asyncio.Task[None]] = []

    async def run(self, num_requests: int) -> None:
        """All requests to their ends, with faults among them; raises AssertionError for what must not be."""
        self._num_requests = num_requests
        keeper = asyncio.create_task(self._remote.keep())
        async with Client(self._server.address) as client:
            await self._calm_down(client)
            wanted = [(await self._one(client, kind)).generated_token_ids for kind in range(NUM_KINDS)]
            faults = asyncio.create_task(self._strike(client))
            await asyncio.gather(*(self._loop(client) for _ in range(CONCURRENCY)))
            await faults
            await asyncio.gather(*self._resumes)
            await self._calm_down(client)
            await self._check_requests(client, wanted)
        keeper.cancel()

    def _workers(self) -> list[psutil.Process]:
        """All that run at the moment, started or starting."""
        local = [process for process in psutil.Process(self._server.pid).children() if not is_gone(process)]
        return [*local, *self._remote.processes()]

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

    async def _strike(self, client: Client) -> None:
        """Faults spread over the requests, each as soon as so many have ended; some come at once."""
        num_faults = max(LEAST_FAULTS, self._num_requests // REQUESTS_PER_FAULT)
        moments = sorted(self._draw.randrange(int(0.9 * self._num_requests)) for _ in range(num_faults))
        faults = [MIXTURE[number % len(MIXTURE)] for number in range(num_faults)]
        self._draw.shuffle(faults)
        for moment, fault in zip(moments, faults, strict=True):
            while len(self.outcome.states) < NUM_KINDS + moment:
                await asyncio.sleep(0.01)
            await self._hit(client, fault)

    async def _hit(self, client: Client, fault: Fault) -> None:
        """Hit any worker, but stop only one that is ready: those that start are given a longer time than the test."""
        victims: list[psutil.Process] = []
        while not victims:
            await asyncio.sleep(0.01)
            ready = {worker.pid for worker in (await client.status()).workers if worker.ready}
            workers = [process for process in self._workers() if process not in self.outcome.killed]
            self._household.look()
            victims = [process for process in workers if fault is not Fault.STOP or process.pid in ready]
        victim = self._draw.choice(victims)
        if fault is Fault.KILL:
            self.outcome.killed.add(victim)
            if victim.pid in ready:  # a remote one that has not joined yet dies unseen
                self.outcome.killed_ready.add(victim.pid)
        try:
            victim.kill() if fault is Fault.KILL else victim.suspend()
        except psutil.NoSuchProcess:
            return
        if fault is not Fault.KILL:
            pause_s = self._draw.uniform(0.1, 1.0) if fault is Fault.PAUSE else WORKER_TIMEOUT_S + 1.5
            self._resumes.append(asyncio.create_task(_resume(victim, pause_s)))

    # ---- afterwards ----

    async def _calm_down(self, client: Client) -> None:
        """As many workers as ever are ready, and none holds anything."""

        async def is_calm() -> bool:
            status = await client.status()
            self._household.look()
            is_idle = not any(worker.pages_used or worker.outstanding_prefill_tokens for worker in status.workers)
            return is_idle and sum(worker.ready for worker in status.workers) == self._num_workers

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
        assert lost_pids(events) >= self.outcome.killed_ready


def lost_pids(events: Sequence[Event]) -> set[int]:
    """Process ids of workers that were ready once and lost later."""
    pids: dict[int, int] = {}
    lost: set[int] = set()
    for event in events:
        if isinstance(event, WorkerUp):
            pids[event.worker_id] = event.pid
        elif isinstance(event, WorkerLost) and event.worker_id in pids:
            lost.add(pids[event.worker_id])
    return lost


async def _resume(process: psutil.Process, after_s: float) -> None:
    await asyncio.sleep(after_s)
    try:
        process.resume()
    except psutil.NoSuchProcess:
        return
