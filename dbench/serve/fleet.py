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
from dbench.serve.wire_link import Ready


class WorkerPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    ENDED = "ended"
    """Its stream ended after it was asked to drain."""


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
    pid: int = 0
    phase: WorkerPhase = WorkerPhase.STARTING
    capacity: Ready | None = None
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

    def observe_clock(self, now_s: float, worker_now_s: float) -> None:
        self.clock_offset_s = min(self.clock_offset_s, now_s - worker_now_s)

    def count(self, end: BlockEnd) -> None:
        """Add a block's steps to the counters, whatever became of it."""
        self.num_forward_passes += len(end.steps)
        self.num_unmasked_tokens += sum(step.num_unmasked for step in end.steps)

    def status(self) -> WorkerStatus:
        seen, capacity = self.last_state, self.capacity
        is_ready = self.phase is WorkerPhase.READY
        return WorkerStatus(
            worker_id=self.worker_id,
            kind=COLOCATED,
            device=self.device,
            ready=is_ready,
            state=(seen.state if seen is not None else "idle") if is_ready else self.phase.value,
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
        )


class Fleet:
    """All workers, by id; those that are expected are there from the start."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.workers = {worker_id: Worker(worker_id, device) for worker_id, device in enumerate(devices)}
        self.last_loss = ""

    def __getitem__(self, worker_id: int) -> Worker:
        return self.workers[worker_id]

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self.workers

    def in_phase(self, *phases: WorkerPhase) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.phase in phases]

    @property
    def can_still_work(self) -> bool:
        """A worker is ready or may become so."""
        return bool(self.in_phase(WorkerPhase.READY, WorkerPhase.STARTING))

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
