"""Hybrid mode when workers are lost, transfers fail, or requests are cancelled."""

from __future__ import annotations

import pytest

from dbench.events import BlockFinished, SchedulerDepth
from dbench.serve.sequence import (
    BlockKey,
    Fault,
    Status,
)
from dbench.serve.wire_link import CancelBlock, ReserveBlock
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


def test_a_lost_receiver_restarts_the_block_and_its_sender_drops_it() -> None:
    rig = hybrid_rig()
    tracked = tokens(rig, 20)
    task, lost = rig.last_task()[1], tracked.worker_id
    assert lost is not None
    rig.progress(0, refreshed=(task.key,))
    rig.lose(lost)
    assert (0, CancelBlock(task.key)) in rig.commands
    assert (tracked.attempt, tracked.worker_id) == (1, 3 - lost)


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
    rig.progress(0, refreshed=(BlockKey("r0", 0, 1),))
    epochs = [c.epoch for c in sent_to(rig, 1) if isinstance(c, ReserveBlock)]
    assert len(set(epochs)) == len(epochs) == 2
