"""The workers of a scheduler: their phase, what was given to them, their clocks and their figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dbench.events import WorkerState
from dbench.serve.policy import PrefillRoute, RouteState, WorkerLoad
from dbench.serve.sequence import BlockEnd, BlockKey
from dbench.serve.wire import COLOCATED, WorkerStatus
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
MAX_SILENCE_STEP_S = 2.0
"""More time than this between two looks at the workers is this process's own sleep, which must not be theirs."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at a block that a worker holds."""

    canvas_length: int
    ready_s: float
    routed_s: float


@dataclass(slots=True)
class Worker:
    """One worker; `length_sum` always equals the canvases of its assignments."""

    worker_id: int
    device: str
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
    """Since its last message, or since it is awaited or starts, as far as this process was awake."""
    num_losses: int = 0
    iteration_age_s: float = 0.0
    """Of the iteration that ran when it last said so."""
    clock_offset_s: float = math.inf
    """What turns its clock into ours: the smallest difference seen, the one with the shortest way."""
    assignments: dict[BlockKey, Assignment] = field(default_factory=dict)
    length_sum: int = 0
    last_state: WorkerState | None = None
    num_iterations: int = 0
    num_forward_passes: int = 0
    num_unmasked_tokens: int = 0

    @property
    def load(self) -> WorkerLoad:
        """A colocated worker's prefill tokens fall when a block ends, as its length sum does."""
        return WorkerLoad(self.worker_id, self.length_sum, len(self.assignments), self.length_sum)

    def assign(self, key: BlockKey, assignment: Assignment) -> None:
        assert key not in self.assignments, f"worker {self.worker_id} already holds {key}"
        self.assignments[key] = assignment
        self.length_sum += assignment.canvas_length

    def release(self, key: BlockKey) -> Assignment | None:
        """Take a block off its account; None when it does not hold it."""
        assignment = self.assignments.pop(key, None)
        if assignment is not None:
            self.length_sum -= assignment.canvas_length
        return assignment

    def start(self) -> None:
        """A new process is expected under this id, of whose clock and size nothing is known."""
        self.phase = WorkerPhase.STARTING
        self.pid, self.capacity, self.num_iterations = 0, None, 0
        self.clock_offset_s = math.inf
        self.ready_for_s = None
        self.silent_s = 0.0

    def become_ready(self, device: str, pid: int, capacity: Ready, now_s: float) -> None:
        self.phase = WorkerPhase.READY
        self.device, self.pid, self.capacity = device, pid, capacity
        self.ready_s = now_s
        self.silent_s = self.iteration_age_s = 0.0

    def leave(self, phase: WorkerPhase, now_s: float) -> None:
        """Its stream has ended; its assignments stay until somebody ends them."""
        self.phase = phase
        self.last_state = None
        self.silent_s = 0.0
        self.ready_for_s = None if self.ready_s is None else now_s - self.ready_s
        self.ready_s = None

    def hear(self, now_s: float, progress: EngineProgress) -> None:
        """Take in what a message says of the worker itself."""
        self.clock_offset_s = min(self.clock_offset_s, now_s - progress.now_s)
        self.num_iterations = progress.iteration
        self.silent_s = 0.0
        self.iteration_age_s = progress.iteration_age_s or 0.0

    def hangs(self, timeout_s: float) -> str:
        """Why a ready worker counts as lost, in words; empty for one that moves."""
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
            kind=COLOCATED,
            device=self.device,
            ready=is_ready,
            state=(seen.state if seen is not None else "idle") if is_ready else phase.value,
            pages_total=capacity.pages_total if capacity is not None else 0,
            pages_used=seen.pages_used if seen is not None else 0,
            kv_page_size=capacity.kv_page_size if capacity is not None else 0,
            queue_depth_waiting=seen.queue_depth_waiting if seen is not None else 0,
            queue_depth_active=seen.queue_depth_active if seen is not None else 0,
            outstanding_prefill_tokens=self.length_sum,
            num_iterations=self.num_iterations,
            num_forward_passes=self.num_forward_passes,
            num_unmasked_tokens=self.num_unmasked_tokens,
            pid=self.pid,
            num_losses=self.num_losses,
        )


class Fleet:
    """All workers, by id; those that are expected are there from the start: the local ones, then the remote ones."""

    def __init__(self, devices: Sequence[str], num_remote: int = 0, startup_timeout_s: float = 300.0) -> None:
        self.workers = {worker_id: Worker(worker_id, device) for worker_id, device in enumerate(devices)}
        for worker_id in range(len(devices), len(devices) + num_remote):
            self.workers[worker_id] = Worker(worker_id, NOT_YET, is_remote=True, phase=WorkerPhase.AWAITED)
        self.num_expected = len(self.workers)
        self.awaits_lost = False
        """Somebody starts lost local workers again; until then blocks wait for them."""
        self.is_closing = False
        """No worker comes any more."""
        self._startup_timeout_s = startup_timeout_s
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
    def can_still_work(self) -> bool:
        """A worker is ready or may become so."""
        if self.in_phase(WorkerPhase.READY, WorkerPhase.STARTING, WorkerPhase.AWAITED):
            return True
        return any(self._is_awaited_after(worker) for worker in self.in_phase(WorkerPhase.DRAINING))

    def find_hanging(self, now_s: float, timeout_s: float) -> list[tuple[int, str]]:
        """Workers of which too little is heard, and what; to be called every second or so.

        Remote ones that start are among them; of local ones, whoever starts them takes care.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, MAX_SILENCE_STEP_S)
        self._looked_s = now_s
        ready = self.in_phase(WorkerPhase.READY)
        for worker in self.workers.values():
            worker.silent_s += passed_s
        hanging = [(worker.worker_id, reason) for worker in ready if (reason := worker.hangs(timeout_s))]
        return hanging + self._late(WorkerPhase.STARTING, "it was not ready")

    def find_absent(self) -> list[tuple[int, str]]:
        """Remote workers that nobody should wait for any more, and why; to be called after `find_hanging`."""
        return self._late(WorkerPhase.AWAITED, "did not come")

    def _late(self, phase: WorkerPhase, what: str) -> list[tuple[int, str]]:
        limit_s = self._startup_timeout_s
        late = [w.worker_id for w in self.in_phase(phase) if w.is_remote and w.silent_s > limit_s]
        return [(worker_id, f"{what} within startup_timeout_s {limit_s:g}") for worker_id in late]

    def place_of(self, instance: str) -> Worker:
        """Where a remote worker joins: its own place if it had one, else one that nobody has, else a new one."""
        remote = [worker for worker in self.workers.values() if worker.is_remote]
        own = [worker for worker in remote if instance and worker.instance == instance]
        free = [worker for worker in remote if worker.phase.is_away]
        for worker in (*own, *free):
            return worker
        new = Worker(len(self.workers), NOT_YET, is_remote=True, phase=WorkerPhase.AWAITED)
        return self.workers.setdefault(new.worker_id, new)

    def join(self, hello: Hello) -> Worker:
        """A remote worker has dialled; whoever had its place must be away."""
        worker = self.place_of(hello.instance)
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

    def route(self, policy: PrefillRoute, state: RouteState, canvas_length: int, avoid: int | None) -> Worker | None:
        """The worker that takes a canvas; `avoid` only when nobody else is there. None: nobody is ready."""
        ready = self.in_phase(WorkerPhase.READY)
        others = [worker for worker in ready if worker.worker_id != avoid]
        candidates = others or ready
        if not candidates:
            return None
        return self.workers[policy([worker.load for worker in candidates], canvas_length, state)]

    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(worker.status() for worker in self.workers.values())
