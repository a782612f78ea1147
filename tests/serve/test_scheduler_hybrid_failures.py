"""Hybrid mode when workers are lost, transfers fail, or requests are cancelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbench.events import BlockFinished, SchedulerDepth
from dbench.serve.block_pairs import MAX_FORGIVEN_LOSSES
from dbench.serve.sequence import (
    Fault,
    HandedOver,
    Status,
)
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire_link import CancelBlock, ReserveBlock, SendBlock
from tests.serve.scheduler_builders import cancelled, failed
from tests.serve.test_scheduler_hybrid import decoded, free_pages, hand_over, hybrid_rig, sent_to, tokens


@pytest.mark.parametrize(("lost", "overflow"), [((0,), False), ((1, 2), True), ((1, 2), False)])
def test_requests_end_when_a_needed_kind_of_worker_is_gone(lost: tuple[int, ...], overflow: bool) -> None:
    rig = hybrid_rig(overflow=overflow, overload_threshold=20)
    requests = [tokens(rig, 20), tokens(rig, 20)]
    for worker_id in lost:
        rig.lose(worker_id)
    assert [tracked.status for tracked in requests] == [Status.ERROR] * 2
    assert "no worker is left" in requests[0].error


def receiver_of(tracked: TrackedRequest) -> int:
    assert tracked.worker_id is not None
    return tracked.worker_id


# ---- failures -----------------------------------------------------------------------------------


def test_a_lost_sender_restarts_the_block_and_its_receiver_drops_it() -> None:
    rig = hybrid_rig(num_prefill=2, num_colocated=1)
    tracked = tokens(rig, 20)
    task = rig.last_task()[1]
    rig.progress(1 + 1, reserved=(task.key,))
    lost = tracked.refresher_id
    assert lost is not None
    rig.lose(lost)
    assert (2, CancelBlock(task.key)) in rig.commands
    assert (tracked.attempt, tracked.refresher_id) == (1, 1 - lost)
    assert rig.fleet[2].num_free_pages == 32 - 10
    rig.progress(2, cancelled(task))
    assert rig.fleet[2].num_free_pages == 32 - 5
    rig.progress(2, decoded(hand_over(rig, tracked, 1 - lost, 2), 1 - lost))
    assert tracked.status is Status.COMPLETED
    assert [(event.attempt, event.outcome) for event in rig.of(BlockFinished)] == [(0, "failed"), (1, "done")]


@pytest.mark.parametrize("num_messages", range(3))
def test_a_block_that_loses_its_receiver_is_sent_to_another_from_where_it_is_and_it_costs_no_retry(
    num_messages: int,
) -> None:
    rig = hybrid_rig(retries=0)
    tracked = tokens(rig, 20)
    task, lost = rig.last_task()[1], receiver_of(tracked)
    for worker_id, given in ((lost, "reserved"), (0, "refreshed"))[:num_messages]:
        rig.progress(worker_id, **{given: (task.key,)})  # type: ignore[arg-type]
    rig.lose(lost)
    other = 3 - lost
    assert receiver_of(tracked) == other
    (reserve,) = [c for c in sent_to(rig, other) if isinstance(c, ReserveBlock)]
    rig.progress(other, reserved=(task.key,))
    assert sent_to(rig, 0)[-1] == SendBlock(task.key, other, reserve.epoch)
    rig.progress(0, refreshed=(task.key,))
    assert tracked.status.value == "WAITING_DECODE"
    rig.progress(0, handed_over=(task.key,))
    rig.progress(other, refreshed=(task.key,))
    rig.progress(other, decoded(task))
    assert tracked.status is Status.COMPLETED
    assert len(list(rig.tasks())) == 1
    assert [(event.attempt, event.outcome) for event in rig.of(BlockFinished)] == [(0, "done")]
    assert free_pages(rig)[0] == 32


def test_a_block_that_loses_its_only_receiver_waits_with_its_kv_for_the_next() -> None:
    rig = hybrid_rig(num_colocated=1, retries=0)
    rig.fleet.awaits_lost = True
    tracked = tokens(rig, 20)
    rig.progress(0, refreshed=(tracked.key,))
    rig.lose(1)
    assert (tracked.status, tracked.worker_id, tracked.refresher_id) == (Status.WAITING_DECODE, None, 0)
    rig.restart(1)
    rig.ready(1)
    assert (tracked.attempt, tracked.worker_id) == (0, 1)


def test_a_block_whose_receiver_is_lost_before_its_refresh_has_ended_needs_no_other_when_that_completes_it() -> None:
    rig = hybrid_rig(num_colocated=1)
    rig.fleet.awaits_lost = True
    tracked = tokens(rig, 20)
    rig.lose(1)
    assert tracked.status.value == "PREFILLING"
    rig.finish_block()
    assert tracked.status is Status.COMPLETED
    assert rig.of(SchedulerDepth)[-1].decode_ready_requests == 0


def test_a_block_whose_kv_had_all_gone_to_a_lost_worker_is_restarted_and_its_next_receiver_drops_it() -> None:
    rig = hybrid_rig()
    tracked = tokens(rig, 20)
    task, lost = rig.last_task()[1], receiver_of(tracked)
    rig.progress(lost, reserved=(task.key,))
    rig.progress(0, refreshed=(task.key,))
    sent = HandedOver(task.key, rig.fleet[0].assignments[task.key].epoch)
    rig.lose(lost)
    rig.progress(3 - lost, reserved=(task.key,))
    rig.progress(0, handed_over=(sent,))
    assert (3 - lost, CancelBlock(task.key)) in rig.commands
    assert (tracked.attempt, tracked.num_failures, tracked.refresher_id) == (1, 1, 0)


def test_a_receiver_that_is_lost_after_decoding_has_begun_counts() -> None:
    rig = hybrid_rig()
    tracked = tokens(rig, 20)
    lost = receiver_of(tracked)
    hand_over(rig, tracked, decoder=lost)
    rig.lose(lost)
    assert (tracked.attempt, tracked.num_failures) == (1, 1)


def test_a_sender_that_is_lost_when_its_refresh_has_ended_costs_no_retry() -> None:
    rig = hybrid_rig(num_prefill=2, num_colocated=1, retries=0)
    tracked = tokens(rig, 20)
    assert tracked.refresher_id is not None
    rig.progress(tracked.refresher_id, refreshed=(tracked.key,))
    rig.lose(tracked.refresher_id)
    assert (tracked.status, tracked.attempt, tracked.num_failures) == (Status.PREFILLING, 1, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_block_after_whose_refresh_workers_are_lost_again_and_again_ends(lost: int) -> None:
    rig = hybrid_rig(num_colocated=1, retries=1, overflow=False)
    rig.fleet.awaits_lost = True
    tracked = tokens(rig, 20)
    num_losses = 0
    while not tracked.status.is_final:
        rig.progress(0, refreshed=(tracked.key,))
        rig.lose(lost)
        num_losses += 1
        rig.restart(lost)
        rig.ready(lost)
    assert num_losses == MAX_FORGIVEN_LOSSES + 2
    assert tracked.error == f"block 0 failed 2 times, last on worker {lost}: worker {lost} was lost: its stream ended"


def test_a_sender_that_is_lost_after_decoding_has_begun_does_no_harm() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    task = rig.last_task()[1]
    rig.progress(1, reserved=(task.key,))
    rig.progress(1, refreshed=(task.key,))
    rig.lose(0)
    assert (tracked.status, tracked.attempt) == (Status.DECODING, 0)
    rig.progress(1, decoded(task))
    assert tracked.status is Status.COMPLETED


@pytest.mark.parametrize("reporter", [0, 1])
def test_a_failed_transfer_gives_the_pair_a_new_link_and_counts_once(reporter: int) -> None:
    rig = hybrid_rig(num_colocated=1, retries=1)
    tracked = tokens(rig, 20)
    task = rig.last_task()[1]
    epochs = [c.epoch for c in sent_to(rig, 1) if isinstance(c, ReserveBlock)]
    for worker_id in (reporter, 1 - reporter):
        rig.progress(worker_id, failed(task, "block 0: KV transfer to worker 1: no", Fault.TRANSFER))
    epochs = [c.epoch for c in sent_to(rig, 1) if isinstance(c, ReserveBlock)]
    assert len(set(epochs)) == 2
    assert (tracked.attempt, tracked.num_failures) == (1, 1)
    assert len(rig.of(BlockFinished)) == 1


def test_after_a_failed_transfer_the_other_end_is_avoided() -> None:
    rig = hybrid_rig(num_prefill=1, num_colocated=2)
    tracked = tokens(rig, 20)
    decoder = tracked.worker_id
    assert decoder is not None
    rig.progress(0, failed(rig.last_task()[1], "block 0: KV transfer: no", Fault.TRANSFER))
    assert tracked.worker_id == 3 - decoder


@pytest.mark.parametrize("num_colocated", [1, 2], ids=["nobody takes its place", "another takes its place"])
def test_a_lost_receiver_that_never_came_is_the_fault_of_no_other_worker(num_colocated: int) -> None:
    rig = hybrid_rig(num_prefill=2, num_colocated=num_colocated, retries=0, overflow=False)
    rig.fleet.awaits_lost = True
    tracked = tokens(rig, 20)
    task, sender, lost = rig.last_task()[1], tracked.refresher_id, receiver_of(tracked)
    assert sender is not None
    epoch = rig.fleet[sender].assignments[task.key].epoch
    rig.lose(lost)
    links = [rig.fleet[sender].assignments[task.key].epoch] if num_colocated > 1 else []
    error = f"block 0: KV transfer to worker {lost}: it did not come"
    rig.progress(sender, replace(failed(task, error, Fault.TRANSFER), link_epoch=epoch))
    assert (tracked.status, tracked.attempt, tracked.num_failures) == (Status.PREFILLING, 1, 0)
    assert tracked.avoid_worker_id == lost
    if links:
        assert rig.fleet.links.of(sender, 5 - lost) == links[0]


def test_after_a_receiver_that_may_have_begun_is_lost_its_sender_is_not_avoided() -> None:
    rig = hybrid_rig(num_prefill=2, num_colocated=2, retries=0)
    tracked = tokens(rig, 20)
    task, sender, lost = rig.last_task()[1], tracked.refresher_id, receiver_of(tracked)
    assert sender is not None
    rig.progress(lost, reserved=(task.key,))
    rig.progress(sender, refreshed=(task.key,))
    sent = HandedOver(task.key, rig.fleet[sender].assignments[task.key].epoch)
    rig.lose(lost)
    rig.progress(sender, handed_over=(sent,))
    assert tracked.error == f"block 0 failed once, last on worker {lost}: worker {lost} was lost: its stream ended"


def test_other_blocks_of_a_pair_keep_their_link_until_it_fails() -> None:
    rig = hybrid_rig(num_colocated=1, overload_threshold=1000)
    for _ in range(2):
        tokens(rig, 20)
    epochs = [c.epoch for c in sent_to(rig, 1) if isinstance(c, ReserveBlock)]
    assert epochs[0] == epochs[1]


def test_cancelling_tells_both_workers_and_frees_each_when_it_answers() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    task = rig.last_task()[1]
    rig.cancel("r0")
    assert {worker_id for worker_id, command in rig.commands if command == CancelBlock(task.key)} == {0, 1}
    rig.progress(0, cancelled(task))
    assert free_pages(rig) == [32, 27]
    rig.progress(1, cancelled(task))
    assert free_pages(rig) == [32, 32]
    assert len(rig.of(BlockFinished)) == 1
    assert tracked.status is Status.CANCELLED


def test_cancelling_a_block_that_waits_for_pages_takes_it_out_of_the_queue() -> None:
    rig = hybrid_rig(num_colocated=1, num_pages=16, overload_threshold=1000)
    task = hand_over(rig, tokens(rig, 60))
    waiting = tokens(rig, 28)
    rig.progress(0, refreshed=(waiting.key,))
    rig.cancel("r1")
    rig.progress(1, decoded(task))
    assert waiting.worker_id is None
    assert rig.of(SchedulerDepth)[-1].decode_ready_requests == 0


def test_a_worker_that_starts_again_meets_the_others_anew() -> None:
    rig = hybrid_rig(num_colocated=1, retries=5)
    rig.fleet.awaits_lost = True
    tokens(rig, 20)
    rig.lose(1)
    rig.restart(1)
    rig.ready(1)
    epochs = [c.epoch for c in sent_to(rig, 1) if isinstance(c, ReserveBlock)]
    assert len(set(epochs)) == len(epochs) == 2
