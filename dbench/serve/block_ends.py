"""What the end of a block on its worker means to the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dbench.events import BlockFinished
from dbench.serve.fleet import SCHEDULER, Assignment, Worker, WorkerPhase
from dbench.serve.sequence import BlockEnd, BlockOutcome, Fault, RefreshTimes
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


def block_finished(
    worker: Worker, end: BlockEnd, assignment: Assignment, now_s: float, partner: Worker | None
) -> BlockFinished:
    """The event, with the workers' times on the scheduler's clock; `partner` may have refreshed the block."""
    offset, times, key = worker.clock_offset_s, end.times, end.key
    event = BlockFinished(
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
    if end.refreshed_elsewhere is None or partner is None:
        return event
    # a partner that was just started again has no clock yet
    partner_offset_s = partner.clock_offset_s if math.isfinite(partner.clock_offset_s) else offset
    return _with_refresh_elsewhere(event, end.refreshed_elsewhere, partner_offset_s)


def _with_refresh_elsewhere(event: BlockFinished, times: RefreshTimes, offset_s: float) -> BlockFinished:
    """The event of a block whose KV came from another worker, whose clock is `offset_s` behind the scheduler's."""
    refresh_end_s = times.refresh_end_s + offset_s
    return replace(
        event,
        prefill_worker_id=times.worker_id,
        received_s=times.received_s + offset_s,
        refresh_start_s=times.refresh_start_s + offset_s,
        refresh_end_s=refresh_end_s,
        step_end_s=(refresh_end_s, *event.step_end_s[1:]),
        kv_transfer_start_s=times.transfer_start_s + offset_s,
        kv_transfer_end_s=event.refresh_end_s,
    )
