"""The workers of a scheduler: their phase, what was given to them, their clocks and their figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dbench.events import WorkerState
from dbench.options import COLOCATED, PREFILL
from dbench.serve.link_epochs import LinkEpochs
from dbench.serve.routes import WorkerLoad
from dbench.serve.sequence import BlockEnd, BlockKey
from dbench.serve.wire import WorkerCount, WorkerStatus
from dbench.serve.wire_link import EngineProgress, Hello, Ready


class WorkerPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    AWAITED = "awaited"
    """It is not there, and somebody is about to start it, or to start it again."""
    LOST = "lost"
    ENDED = "ended"
    """Its stream ended after it was asked to drain."""

    @property
    def is_away(self) -> bool:
        """It has no process and no stream, as far as is known."""
        return self in (WorkerPhase.AWAITED, WorkerPhase.LOST, WorkerPhase.ENDED)


SCHEDULER = "scheduler"
"""Source of the scheduler's events."""
NOT_YET = "remote"
"""The device of a remote worker that has never been there."""
MAX_CLOCK_DRIFT = 1e-4
"""Seconds per second that the clocks of two hosts may differ in pace; without a time service they differ by less."""
MAX_SILENCE_STEP_S = 2.0
"""More time than this between two looks at the workers is this process's own sleep, which must not be theirs."""


@dataclass(slots=True)
class Assignment:
    """One attempt at a block that a worker holds; in hybrid mode two workers hold it for a while."""

    canvas_length: int
    ready_s: float
    routed_s: float
    prefill_tokens: int
    """Of its refresh, until that is off the worker's account."""
    is_charged: bool = True
    """It counts in the worker's load; the blocks of a pinned request do not, the pin does."""
    partner_id: int | None = None
    """The other worker that holds it."""
    epoch: int = 0
    """Of the link to the partner."""
    is_reported: bool = False
    """The attempt has its BlockFinished."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A request that keeps its worker, and what it charges there until it ends."""

    prefill_tokens: int
    canvas_length: int


@dataclass(slots=True)
class Worker:
    """One worker, and its load: what is assigned and pinned to it and counts."""

    worker_id: int
    device: str
    kind: str = COLOCATED
    is_remote: bool = False
    """Somebody else starts its process, on whatever host."""
    instance: str = ""
    """Of a remote worker: which process it is, or was."""
    pid: int = 0
    phase: WorkerPhase = WorkerPhase.STARTING
    capacity: Ready | None = None
    ready_s: float | None = None
    """Since when it is ready."""
    ready_for_s: float | None = None
    """How long it had been ready when it was lost; None: never since it was last started."""
    silent_s: float = 0.0
    """Since its last message, as far as this process was awake."""
    phase_age_s: float = 0.0
    """Since it is awaited or starts, as far as this process was awake."""
    num_losses: int = 0
    iteration_age_s: float = 0.0
    """Of the iteration that ran when it last said so."""
    clock_offset_s: float = math.inf
    """What turns its clock into ours: the smallest difference seen, the one with the shortest way. On another host,
    whose clock has a pace of its own, what was seen long ago counts less."""
    heard_s: float = 0.0
    """When its last message came."""
    assignments: dict[BlockKey, Assignment] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    """By request id."""
    outstanding_prefill_tokens: int = 0
    num_requests: int = 0
    length_sum: int = 0
    num_pages_given: int = 0
    """Pages that its assignments take or will take."""
    last_state: WorkerState | None = None
    num_iterations: int = 0
    num_forward_passes: int = 0
    num_unmasked_tokens: int = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that no assignment has a claim to; 0 while its size is unknown."""
        return 0 if self.capacity is None else self.capacity.pages_total - self.num_pages_given

    def load(self, *, has_fast_link: bool = False) -> WorkerLoad:
        return WorkerLoad(
            self.worker_id,
            self.outstanding_prefill_tokens,
            self.num_requests,
            self.length_sum,
            self.num_free_pages,
            has_fast_link,
        )

    def has_pages_for(self, canvas_length: int) -> bool:
        return self._pages(canvas_length) <= self.num_free_pages

    def can_ever_hold(self, canvas_length: int) -> bool:
        return self.capacity is None or self._pages(canvas_length) <= self.capacity.pages_total

    def assign(self, key: BlockKey, assignment: Assignment) -> None:
        assert key not in self.assignments, f"worker {self.worker_id} already holds {key}"
        self.assignments[key] = assignment
        self.num_pages_given += self._pages(assignment.canvas_length)
        if assignment.is_charged:
            self._charge(assignment.prefill_tokens, 1, assignment.canvas_length)

    def refresh_ended(self, key: BlockKey) -> None:
        """Its prefill tokens are no longer outstanding; nothing for a block that it does not hold."""
        assignment = self.assignments.get(key)
        if assignment is not None and assignment.is_charged:
            self._charge(-assignment.prefill_tokens, 0, 0)
            assignment.prefill_tokens = 0

    def release(self, key: BlockKey) -> Assignment | None:
        """Take a block off its account; None when it does not hold it."""
        assignment = self.assignments.pop(key, None)
        if assignment is not None:
            self.num_pages_given -= self._pages(assignment.canvas_length)
            if assignment.is_charged:
                self._charge(-assignment.prefill_tokens, -1, -assignment.canvas_length)
        return assignment

    def pin(self, request_id: str, pin: Pin) -> None:
        assert request_id not in self.pins, f"request {request_id} is pinned to worker {self.worker_id} already"
        self.pins[request_id] = pin
        self._charge(pin.prefill_tokens, 1, pin.canvas_length)

    def unpin(self, request_id: str) -> None:
        pin = self.pins.pop(request_id)
        self._charge(-pin.prefill_tokens, -1, -pin.canvas_length)

    def _charge(self, prefill_tokens: int, num_requests: int, length: int) -> None:
        self.outstanding_prefill_tokens += prefill_tokens
        self.num_requests += num_requests
        self.length_sum += length

    def _pages(self, canvas_length: int) -> int:
        return 0 if self.capacity is None else -(-canvas_length // self.capacity.kv_page_size)

    def start(self) -> None:
        """A new process is expected under this id, of whose clock and size nothing is known."""
        self.phase = WorkerPhase.STARTING
        self.pid, self.capacity, self.num_iterations = 0, None, 0
        self.clock_offset_s = math.inf
        self.ready_for_s = None
        self.silent_s = self.phase_age_s = 0.0

    def become_ready(self, device: str, pid: int, capacity: Ready, now_s: float) -> None:
        self.phase = WorkerPhase.READY
        self.device, self.pid, self.capacity = device, pid, capacity
        self.ready_s = now_s
        self.silent_s = self.iteration_age_s = 0.0

    def leave(self, phase: WorkerPhase, now_s: float) -> None:
        """Its stream has ended; its assignments stay until somebody ends them."""
        self.phase = phase
        self.last_state = None
        self.silent_s = self.phase_age_s = 0.0
        self.ready_for_s = None if self.ready_s is None else now_s - self.ready_s
        self.ready_s = None

    def hear(self, now_s: float, progress: EngineProgress) -> None:
        """Take in what a message says of the worker itself."""
        drift_s = MAX_CLOCK_DRIFT * (now_s - self.heard_s) if self.is_remote else 0.0
        self.clock_offset_s = min(self.clock_offset_s + drift_s, now_s - progress.now_s)
        self.heard_s = now_s
        self.num_iterations = progress.iteration
        self.silent_s = 0.0
        self.iteration_age_s = progress.iteration_age_s or 0.0

    def hangs(self, timeout_s: float) -> str:
        """Why a worker that has blocks, or may get some, counts as lost, in words; empty for one that moves."""
        if self.iteration_age_s > timeout_s:
            number = self.num_iterations + 1
            return f"its iteration {number} has run for {self.iteration_age_s:.1f} s, worker_timeout_s is {timeout_s:g}"
        if self.silent_s > timeout_s:
            return f"nothing was heard of it for {self.silent_s:.1f} s, worker_timeout_s is {timeout_s:g}"
        return ""

    def count(self, end: BlockEnd) -> None:
        """Add a block's steps to the counters, whatever became of it."""
        self.num_forward_passes += len(end.steps)
        self.num_unmasked_tokens += sum(step.num_unmasked for step in end.steps)

    def status(self) -> WorkerStatus:
        seen, capacity = self.last_state, self.capacity
        is_ready = self.phase is WorkerPhase.READY
        is_restarted = self.phase is WorkerPhase.AWAITED and not self.is_remote
        phase = WorkerPhase.STARTING if is_restarted else self.phase
        return WorkerStatus(
            worker_id=self.worker_id,
            kind=self.kind,
            device=self.device,
            ready=is_ready,
            state=(seen.state if seen is not None else "idle") if is_ready else phase.value,
            pages_total=capacity.pages_total if capacity is not None else 0,
            pages_used=seen.pages_used if seen is not None else 0,
            kv_page_size=capacity.kv_page_size if capacity is not None else 0,
            queue_depth_waiting=seen.queue_depth_waiting if seen is not None else 0,
            queue_depth_active=seen.queue_depth_active if seen is not None else 0,
            outstanding_prefill_tokens=self.outstanding_prefill_tokens,
            num_iterations=self.num_iterations,
            num_forward_passes=self.num_forward_passes,
            num_unmasked_tokens=self.num_unmasked_tokens,
            pid=self.pid,
            num_losses=self.num_losses,
            metrics_address=capacity.metrics_address if capacity is not None else "",
        )


@dataclass(frozen=True, slots=True)
class FleetRules:
    """Which workers there are."""

    devices: Sequence[str]
    """Of the local ones, one each; their places are their ids."""
    num_remote: int = 0
    """Remote ones that are expected, without those that only refresh."""
    startup_timeout_s: float = 300.0
    num_prefill: int = 0
    """So many local ones, from the first, only refresh."""
    num_remote_prefill: int = 0
    """Remote ones that are expected and only refresh."""
    refreshes_anywhere: bool = True
    """All others refresh too."""

    @property
    def is_hybrid(self) -> bool:
        return self.num_prefill + self.num_remote_prefill > 0


class Fleet:
    """All workers, by id; those that are expected are there from the start: the local ones, then the remote ones."""

    def __init__(self, rules: FleetRules) -> None:
        self.workers = {
            worker_id: Worker(worker_id, device, PREFILL if worker_id < rules.num_prefill else COLOCATED)
            for worker_id, device in enumerate(rules.devices)
        }
        for kind in (*[PREFILL] * rules.num_remote_prefill, *[COLOCATED] * rules.num_remote):
            self._new_place(kind)
        self.num_expected = len(self.workers)
        self.is_hybrid = rules.is_hybrid
        self.links = LinkEpochs()
        self._needed_kinds = (COLOCATED,) if rules.refreshes_anywhere else (PREFILL, COLOCATED)
        self.awaits_lost = False
        """Somebody starts lost local workers again; until then blocks wait for them."""
        self.is_closing = False
        """No worker comes any more."""
        self._startup_timeout_s = rules.startup_timeout_s
        self.last_loss = ""
        self._looked_s: float | None = None

    def __getitem__(self, worker_id: int) -> Worker:
        return self.workers[worker_id]

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self.workers

    def in_phase(self, *phases: WorkerPhase) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.phase in phases]

    @property
    def is_complete(self) -> bool:
        """All that are expected are ready, whoever else may have joined."""
        return all(self.workers[number].phase is WorkerPhase.READY for number in range(self.num_expected))

    @property
    def can_work(self) -> bool:
        """Requests that come now will be run by somebody who is ready."""
        return self._has_every_kind(self.in_phase(WorkerPhase.READY))

    @property
    def can_still_work(self) -> bool:
        """Enough workers are ready or may become so."""
        hopeful = self.in_phase(WorkerPhase.READY, WorkerPhase.STARTING, WorkerPhase.AWAITED)
        awaited = [worker for worker in self.in_phase(WorkerPhase.DRAINING) if self._is_awaited_after(worker)]
        return self._has_every_kind([*hopeful, *awaited])

    def ready(self, kind: str) -> list[Worker]:
        return [worker for worker in self.in_phase(WorkerPhase.READY) if worker.kind == kind]

    def of_kind(self, kind: str) -> list[Worker]:
        """Those that are ready or may become so."""
        hopeful = self.in_phase(WorkerPhase.READY, WorkerPhase.STARTING, WorkerPhase.AWAITED)
        return [worker for worker in hopeful if worker.kind == kind]

    def find_hanging(self, now_s: float, timeout_s: float) -> list[tuple[int, str]]:
        """Workers of which too little is heard, and what; to be called every second or so.

        Remote ones that start are among them; of local ones, whoever starts them takes care.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, MAX_SILENCE_STEP_S)
        self._looked_s = now_s
        for worker in self.workers.values():
            worker.silent_s += passed_s
            worker.phase_age_s += passed_s
        at_work = self.in_phase(WorkerPhase.READY, WorkerPhase.DRAINING)
        hanging = [(worker.worker_id, reason) for worker in at_work if (reason := worker.hangs(timeout_s))]
        return hanging + self._late(WorkerPhase.STARTING, "it was not ready")

    def find_absent(self) -> list[tuple[int, str]]:
        """Remote workers that nobody should wait for any more, and why; to be called after `find_hanging`."""
        return self._late(WorkerPhase.AWAITED, "did not come")

    def _late(self, phase: WorkerPhase, what: str) -> list[tuple[int, str]]:
        limit_s = self._startup_timeout_s
        late = [w.worker_id for w in self.in_phase(phase) if w.is_remote and w.phase_age_s > limit_s]
        return [(worker_id, f"{what} within startup_timeout_s {limit_s:g}") for worker_id in late]

    def place_of(self, hello: Hello) -> Worker:
        """Where a remote worker joins: its own place if it had one, else a free one of its kind, else a new one."""
        remote = [worker for worker in self.workers.values() if worker.is_remote and worker.kind == hello.kind]
        own = [worker for worker in remote if hello.instance and worker.instance == hello.instance]
        free = [worker for worker in remote if worker.phase.is_away]
        for worker in (*own, *free):
            return worker
        return self._new_place(hello.kind)

    def _new_place(self, kind: str) -> Worker:
        """For a remote worker."""
        new = Worker(len(self.workers), NOT_YET, kind, is_remote=True, phase=WorkerPhase.AWAITED)
        return self.workers.setdefault(new.worker_id, new)

    def join(self, hello: Hello) -> Worker:
        """A remote worker has dialled; whoever had its place must be away."""
        worker = self.place_of(hello)
        assert worker.phase.is_away, f"worker {worker.worker_id} joins again but is {worker.phase}"
        worker.device = f"{hello.device} on {hello.host}" if hello.host else hello.device
        worker.instance = hello.instance
        worker.start()
        return worker

    def vacate(self, worker: Worker, why: str, now_s: float) -> None:
        """A worker's stream has ended: it is awaited where it may come again, else lost, or ended after a drain."""
        was_drained = worker.phase is WorkerPhase.DRAINING
        worker.num_losses += not was_drained
        self.last_loss = why
        gone = WorkerPhase.ENDED if was_drained else WorkerPhase.LOST
        worker.leave(WorkerPhase.AWAITED if self._is_awaited_after(worker) else gone, now_s)

    def _is_awaited_after(self, worker: Worker) -> bool:
        """Whether blocks wait for it, or for another in its place, when its stream has ended."""
        was_drained = worker.phase is WorkerPhase.DRAINING
        if worker.is_remote:
            return not self.is_closing and (not was_drained or worker.worker_id < self.num_expected)
        return self.awaits_lost and not was_drained

    @property
    def takes_remote(self) -> bool:
        """Some worker comes, or came, from elsewhere."""
        return any(worker.is_remote for worker in self.workers.values())

    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(worker.status() for worker in self.workers.values())

    def counts(self) -> tuple[WorkerCount, ...]:
        kinds = (PREFILL, COLOCATED) if self.is_hybrid else (COLOCATED,)
        expected = [self.workers[number].kind for number in range(self.num_expected)]
        return tuple(WorkerCount(kind, expected.count(kind), len(self.ready(kind))) for kind in kinds)

    def _has_every_kind(self, workers: Sequence[Worker]) -> bool:
        return {worker.kind for worker in workers}.issuperset(self._needed_kinds)
