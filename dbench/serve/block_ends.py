"""What the end of a block on its worker means to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from dbench.events import BlockFinished
from dbench.serve.fleet import SCHEDULER, Assignment, Worker, WorkerPhase
from dbench.serve.sequence import BlockEnd, BlockOutcome, Fault
from dbench.serve.tracking import TrackedRequest


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an ended block cannot be taken in."""

    text: str
    fault: Fault


def problem_of(end: BlockEnd, tracked: TrackedRequest, worker: Worker) -> Problem | None:
    """None: the block's ids are the next ones of the request."""
    if end.outcome is BlockOutcome.CANCELLED and worker.phase is WorkerPhase.DRAINING:
        return Problem(f"worker {worker.worker_id} left", Fault.NOBODY)
    if end.outcome is BlockOutcome.CANCELLED:
        return Problem("the worker dropped a block that nobody had cancelled", Fault.WORKER)
    if end.outcome is BlockOutcome.FAILED:
        return Problem(end.error or "the worker gave no reason", end.fault)
    wanted = tracked.shape.block_length
    is_cut = end.found_eos and not tracked.request.ignore_eos and 0 < len(end.token_ids) <= wanted
    if len(end.token_ids) != wanted and not is_cut:
        return Problem(f"the worker returned {len(end.token_ids)} ids for a block of {wanted}", Fault.WORKER)
    return None


def block_finished(worker: Worker, end: BlockEnd, assignment: Assignment, now_s: float) -> BlockFinished:
    """The event, with the worker's times on the scheduler's clock."""
    offset, times, key = worker.clock_offset_s, end.times, end.key
    return BlockFinished(
        at_s=now_s,
        source=SCHEDULER,
        request_id=key.request_id,
        block_index=key.block_index,
        attempt=key.attempt,
        worker_id=worker.worker_id,
        outcome=end.outcome.value,
        error=end.error,
        ready_s=assignment.ready_s,
        routed_s=assignment.routed_s,
        received_s=None if times is None else times.received_s + offset,
        refresh_start_s=None if times is None else times.refresh_start_s + offset,
        refresh_end_s=None if times is None else times.refresh_end_s + offset,
        decode_start_s=None if times is None else times.decode_start_s + offset,
        end_s=None if times is None else times.end_s + offset,
        step_end_s=tuple(step.end_s + offset for step in end.steps),
        step_num_unmasked=tuple(step.num_unmasked for step in end.steps),
    )
