"""Blocks with two workers, one that refreshes and one that decodes: how they get the second, and may lose it."""

from __future__ import annotations

from dataclasses import replace

from dbench.serve.fleet import Assignment, Fleet, Worker
from dbench.serve.sequence import BlockEnd, Fault, Status
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire_link import ReserveBlock

MAX_FORGIVEN_LOSSES = 8
"""Per block. A worker that only had pages for a block, or had done its part, was not lost because of it; after so many
nobody is sure of that any more, and losses count.
"""


def pair(tracked: TrackedRequest, decoder: Worker, fleet: Fleet) -> ReserveBlock:
    """Let a worker take pages for a block that another one refreshes."""
    assert tracked.refresher_id is not None, f"{tracked.key} has nobody who refreshes it"
    refresher = fleet[tracked.refresher_id]
    given = refresher.assignments[tracked.key]
    given.partner_id = decoder.worker_id
    given.epoch = fleet.links.of(refresher.worker_id, decoder.worker_id)
    decoder.assign(tracked.key, replace(given, prefill_tokens=0, partner_id=refresher.worker_id))
    tracked.worker_id = decoder.worker_id
    return ReserveBlock(tracked.task(), refresher.worker_id, given.epoch)


def has_begun_elsewhere(tracked: TrackedRequest, lost: Worker) -> bool:
    """The lost worker had refreshed the block, and its KV has all come to the one that decodes it."""
    return tracked.worker_id != lost.worker_id and tracked.status is Status.DECODING


def may_go_on(tracked: TrackedRequest, lost: Worker) -> bool:
    """The lost worker was to decode the block, and has not begun: its KV is whole where it is refreshed."""
    is_decoder = tracked.worker_id == lost.worker_id and tracked.refresher_id is not None
    is_forgiven = tracked.num_forgiven_losses < MAX_FORGIVEN_LOSSES
    return is_decoder and is_forgiven and tracked.status is not Status.DECODING


def part_from_decoder(tracked: TrackedRequest, lost: Worker, fleet: Fleet, loss: str) -> None:
    """The block stays with the worker that refreshes it, until somebody else can decode it."""
    assert tracked.refresher_id is not None, f"{tracked.key} has nobody who refreshes it"
    lost.release(tracked.key)
    given = fleet[tracked.refresher_id].assignments[tracked.key]
    given.partner_id, given.epoch = None, 0
    tracked.worker_id = None
    tracked.avoid_worker_id = lost.worker_id
    tracked.num_forgiven_losses += 1
    tracked.last_loss = loss


def judged(end: BlockEnd, tracked: TrackedRequest, lost: Worker) -> BlockEnd:
    """The end of a lost worker's block, which is nobody's fault if all that was left to do was to send its KV."""
    is_refreshed = tracked.status is Status.WAITING_DECODE and tracked.refresher_id == lost.worker_id
    if end.fault is not Fault.WORKER or not is_refreshed:
        return end
    return replace(end, fault=_forgiven(end.fault, tracked))


def blamed(
    end: BlockEnd, fault: Fault, tracked: TrackedRequest, worker: Worker, given: Assignment
) -> tuple[int, Fault]:
    """Which worker a failed block is to avoid, and whose fault it counts as.

    What is said of an earlier link of the block than `given` has concerns a worker that is lost: that it did not come
    is nobody's fault, and never that of the worker which takes its place.
    """
    if end.link_epoch not in (0, given.epoch) and tracked.avoid_worker_id is not None:
        return tracked.avoid_worker_id, _forgiven(fault, tracked) if fault.ends_link else fault
    if fault.ends_link and given.partner_id is not None:
        return given.partner_id, fault
    return worker.worker_id, fault


def _forgiven(fault: Fault, tracked: TrackedRequest) -> Fault:
    """Nobody's, up to MAX_FORGIVEN_LOSSES times."""
    if tracked.num_forgiven_losses >= MAX_FORGIVEN_LOSSES:
        return fault
    tracked.num_forgiven_losses += 1
    return Fault.NOBODY
