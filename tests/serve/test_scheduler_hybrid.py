"""The scheduler in hybrid mode by hand-worked cases: worker 0 refreshes, workers 1 and 2 decode (and overflow).

Pages hold 4 tokens, blocks have 4 positions; a request of `tokens(n)` has a canvas of n.
"""

from __future__ import annotations

import pytest

from dbench.events import BlockFinished, BlockRouted, SchedulerDepth, WorkerUp
from dbench.serve.sequence import (
    BlockEnd,
    BlockKey,
    BlockOutcome,
    BlockStep,
    BlockTask,
    BlockTimes,
    Fault,
    RefreshTimes,
    SamplingParameters,
    Status,
)
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire_link import CancelBlock, Command, ReserveBlock, RunBlock, SendBlock
from tests.serve.scheduler_builders import BLOCK, Hybrid, Rig, cancelled, done, failed, rules


def hybrid_rig(retries: int = 2, *, ready: bool = True, **given: int | bool | str) -> Rig:
    return Rig(given=rules(retries=retries), ready=ready, hybrid=Hybrid(**given))  # type: ignore[arg-type]


def tokens(rig: Rig, canvas: int, num_blocks: int = 1, **given: SamplingParameters) -> TrackedRequest:
    return rig.submit((1,) * (canvas - num_blocks * BLOCK), num_blocks * BLOCK, **given)


def sent_to(rig: Rig, worker_id: int) -> list[Command]:
    return [command for receiver, command in rig.commands if receiver == worker_id]


def hand_over(rig: Rig, tracked: TrackedRequest, refresher: int = 0, decoder: int = 1) -> BlockTask:
    """From the dispatch of a block to its first decode step."""
    task = next(t for _, t in rig.tasks() if t.key == tracked.key)
    rig.progress(decoder, reserved=(task.key,))
    rig.progress(refresher, refreshed=(task.key,))
    rig.progress(refresher, handed_over=(task.key,))
    rig.progress(decoder, refreshed=(task.key,))
    return task


def decoded(task: BlockTask, refresher: int = 0) -> BlockEnd:
    """Refreshed from 1 to 2 and sent from 1.5 on; all had arrived at 2.25, and a step ran from 2.5 to 3."""
    return BlockEnd(
        task.key,
        BlockOutcome.DONE,
        tuple(range(10, 10 + task.block_length)),
        False,
        "",
        BlockTimes(2.25, 2.25, 2.25, 2.5, 3.0),
        (BlockStep(2.25, 1), BlockStep(3.0, task.block_length - 1)),
        refreshed_elsewhere=RefreshTimes(refresher, 0.5, 1.0, 2.0, 1.5),
    )


def free_pages(rig: Rig) -> list[int]:
    return [worker.num_free_pages for worker in rig.fleet.workers.values()]


def outstanding(rig: Rig) -> list[int]:
    return [worker.outstanding_prefill_tokens for worker in rig.fleet.workers.values()]


# ---- the way of a block -------------------------------------------------------------------------


def test_pages_are_taken_before_the_kv_is_sent() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    (run,) = sent_to(rig, 0)
    (reserve,) = sent_to(rig, 1)
    assert isinstance(run, RunBlock)
    assert isinstance(reserve, ReserveBlock)
    assert (reserve.task, reserve.sender_id) == (run.task, 0)
    rig.progress(1, reserved=(tracked.key,))
    assert sent_to(rig, 0)[1:] == [SendBlock(tracked.key, 1, reserve.epoch)]


def test_statuses_come_in_order() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    seen = [tracked.status]
    rig.progress(1, reserved=(tracked.key,))
    rig.progress(0, refreshed=(tracked.key,))
    seen.append(tracked.status)
    rig.progress(1, refreshed=(tracked.key,))
    seen.append(tracked.status)
    rig.progress(0, handed_over=(tracked.key,))
    seen.append(tracked.status)
    rig.progress(1, decoded(rig.last_task()[1]))
    seen.append(tracked.status)
    assert seen == ["PREFILLING", "WAITING_DECODE", "DECODING", "DECODING", "COMPLETED"]


def test_decoding_that_has_begun_does_not_wait_again_when_the_refresh_is_reported_late() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    rig.progress(1, reserved=(tracked.key,), refreshed=(tracked.key,))
    rig.progress(0, refreshed=(tracked.key,))
    assert tracked.status is Status.DECODING


def test_accounts_follow_the_block_through_both_workers() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    assert (outstanding(rig), free_pages(rig)) == ([20, 0], [27, 27])
    rig.progress(1, reserved=(tracked.key,))
    rig.progress(0, refreshed=(tracked.key,))
    assert (outstanding(rig), free_pages(rig)) == ([0, 0], [27, 27])
    rig.progress(0, handed_over=(tracked.key,))
    assert free_pages(rig) == [32, 27]
    rig.progress(1, decoded(rig.last_task()[1]))
    assert free_pages(rig) == [32, 32]
    assert [worker.load().num_requests for worker in rig.fleet.workers.values()] == [0, 0]


def test_the_event_of_a_block_has_the_times_of_both_workers_and_of_the_way_between_them() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    for worker_id, ahead_s in ((0, 100.0), (1, 50.0)):
        rig.progress(worker_id, worker_now_s=rig.now_s + ahead_s)
    rig.progress(1, decoded(hand_over(rig, tracked)))
    (event,) = rig.of(BlockFinished)
    assert (event.prefill_worker_id, event.worker_id) == (0, 1)
    assert (event.received_s, event.refresh_start_s, event.refresh_end_s) == (-99.5, -99.0, -98.0)
    assert (event.kv_transfer_start_s, event.kv_transfer_end_s) == (-98.5, -47.75)
    assert (event.decode_start_s, event.end_s, event.step_end_s) == (-47.5, -47.0, (-98.0, -47.0))
    (routed,) = rig.of(BlockRouted)
    assert (routed.worker_id, routed.decode_worker_id) == (0, 1)


def test_a_block_that_its_refresh_completes_ends_where_it_was_refreshed() -> None:
    rig = hybrid_rig(num_colocated=1)
    tracked = tokens(rig, 20)
    rig.progress(1, reserved=(tracked.key,))
    _, task = rig.last_task()
    rig.progress(0, done(task, (1, 2, 3, 4)))
    assert tracked.status is Status.COMPLETED
    assert rig.commands[-1] == (1, CancelBlock(task.key))
    rig.progress(1, cancelled(task))
    assert free_pages(rig) == [32, 32]
    assert len(rig.of(BlockFinished)) == 1


def test_nobody_takes_pages_for_a_block_that_is_sure_to_end_with_its_refresh() -> None:
    rig = hybrid_rig(num_colocated=1)
    tokens(rig, 20, sampling=SamplingParameters("conf_quota", fixed_unmask_quota=BLOCK))
    assert sent_to(rig, 1) == []


def test_the_next_block_may_take_other_workers() -> None:
    rig = hybrid_rig(num_prefill=2, prefill_policy="round_robin", decode_policy="round_robin")
    tracked = tokens(rig, 20, num_blocks=2)
    assert (tracked.refresher_id, tracked.worker_id) == (0, 2)
    rig.progress(2, decoded(hand_over(rig, tracked, 0, 2)))
    assert (tracked.block_index, tracked.refresher_id, tracked.worker_id) == (1, 1, 3)


def test_kv_goes_over_fast_links_where_the_policy_asks_for_it() -> None:
    rig = hybrid_rig(
        num_prefill=2,
        num_colocated=2,
        prefill_policy="round_robin",
        decode_policy="topology_guarded_memory",
        fast_pairs="1-2,0-3",
        overload_threshold=1000,
    )
    assert [(t.refresher_id, t.worker_id) for t in [tokens(rig, 20) for _ in range(4)]] == [(0, 3), (1, 2)] * 2


def test_workers_say_what_they_are() -> None:
    rig = hybrid_rig()
    assert [worker.kind for worker in rig.fleet.statuses()] == ["prefill", "colocated", "colocated"]
    assert [event.worker_type for event in rig.of(WorkerUp)] == ["prefill", "colocated", "colocated"]


# ---- who has to wait ----------------------------------------------------------------------------


def test_without_pages_elsewhere_a_block_is_refreshed_and_keeps_its_pages() -> None:
    rig = hybrid_rig(num_colocated=1, num_pages=10, overflow=False, overload_threshold=100)
    first, second = tokens(rig, 24), tokens(rig, 16)
    third = tokens(rig, 16)
    assert (first.worker_id, second.worker_id) == (1, 1)
    assert (third.refresher_id, third.status) == (None, Status.PENDING)  # worker 0 has no pages
    task = hand_over(rig, first)
    assert (third.refresher_id, third.worker_id) == (0, None)
    rig.progress(0, refreshed=(third.key,))
    assert third.status is Status.WAITING_DECODE
    assert rig.of(SchedulerDepth)[-1].decode_ready_requests == 1
    rig.progress(1, decoded(task))
    assert third.worker_id == 1
    assert rig.of(SchedulerDepth)[-1].decode_ready_requests == 0
    rig.progress(1, reserved=(third.key,))
    assert isinstance(rig.commands[-1][1], SendBlock)


def test_the_oldest_refreshed_request_gets_pages_first_and_nobody_passes_it() -> None:
    rig = hybrid_rig(num_colocated=1, num_pages=16, overflow=False, overload_threshold=1000)
    holder = tokens(rig, 60)
    holders_key, task = holder.key, hand_over(rig, holder)
    waiting = [tokens(rig, 8), tokens(rig, 12)]
    for tracked in reversed(waiting):
        rig.progress(0, refreshed=(tracked.key,))
    late = tokens(rig, 4 + BLOCK)
    assert [tracked.worker_id for tracked in (*waiting, late)] == [None, None, None]
    rig.progress(1, decoded(task))
    assert [tracked.worker_id for tracked in waiting] == [1, 1]
    reserved = [command.task.key for command in sent_to(rig, 1) if isinstance(command, ReserveBlock)]
    assert reserved == [holders_key, *(tracked.key for tracked in waiting)]


def test_a_new_block_gets_no_pages_while_a_refreshed_one_waits_for_more() -> None:
    rig = hybrid_rig(num_colocated=1, num_pages=16, overflow=False, overload_threshold=1000)
    holder = tokens(rig, 40)
    hand_over(rig, holder)
    large = tokens(rig, 28)
    rig.progress(0, refreshed=(large.key,))
    small = tokens(rig, 8)
    assert (large.worker_id, small.refresher_id, small.worker_id) == (None, 0, None)


def test_pending_blocks_go_strictly_in_the_order_of_submission() -> None:
    rig = hybrid_rig(num_colocated=1, overflow=False, overload_threshold=20)
    tokens(rig, 20)
    long, short = tokens(rig, 40), tokens(rig, 8)
    assert [tracked.status for tracked in (long, short)] == [Status.PENDING] * 2
    rig.progress(0, refreshed=(BlockKey("r0", 0, 0),))
    assert [tracked.status for tracked in (long, short)] == [Status.PREFILLING, Status.PENDING]


@pytest.mark.parametrize("overflow", [True, False])
def test_a_canvas_that_no_worker_can_ever_hold_goes_to_one_that_says_so(overflow: bool) -> None:
    rig = hybrid_rig(num_colocated=1, num_pages=10, overflow=overflow)
    tracked, behind = tokens(rig, 44), tokens(rig, 20)
    worker_id, task = next((w, t) for w, t in rig.tasks() if t.key == tracked.key)
    rig.progress(worker_id, failed(task, "a canvas of 44 tokens needs 11 KV pages, the worker has 10", Fault.OWN))
    assert tracked.status is Status.ERROR
    assert behind.status is Status.PREFILLING


# ---- overflow -----------------------------------------------------------------------------------


def test_overload_sends_blocks_to_the_colocated_worker_with_the_fewest_tokens() -> None:
    rig = hybrid_rig(overload_threshold=40)
    first = [tokens(rig, 20), tokens(rig, 20)]
    overflowing = [tokens(rig, 16), tokens(rig, 20), tokens(rig, 8)]
    assert [tracked.refresher_id for tracked in first] == [0, 0]
    assert [tracked.refresher_id for tracked in overflowing] == [None] * 3
    ids = [tracked.worker_id for tracked in overflowing]
    assert {ids[0], ids[1]} == {1, 2}
    assert ids[2] == ids[0]


def test_an_overflowing_block_is_decoded_where_it_was_refreshed_and_its_tokens_fall_with_the_refresh() -> None:
    rig = hybrid_rig(num_colocated=1, overload_threshold=20)
    tokens(rig, 20)
    tracked = tokens(rig, 16)
    assert outstanding(rig) == [20, 16]
    rig.progress(1, refreshed=(tracked.key,))
    assert (outstanding(rig), tracked.status.value) == ([20, 0], "DECODING")
    rig.answer(1, rig.last_task()[1])
    assert tracked.status is Status.COMPLETED
    assert rig.of(BlockFinished)[-1].prefill_worker_id is None


def test_colocated_workers_are_overloaded_by_the_same_threshold() -> None:
    rig = hybrid_rig(num_colocated=1, overload_threshold=20)
    refreshed_by = [(t.refresher_id, t.worker_id) for t in [tokens(rig, 20), tokens(rig, 20), tokens(rig, 20)]]
    assert refreshed_by == [(0, 1), (None, 1), (None, None)]


def test_without_overflow_overload_means_waiting() -> None:
    rig = hybrid_rig(num_colocated=1, overload_threshold=20, overflow=False)
    tokens(rig, 20)
    assert tokens(rig, 16).status is Status.PENDING


def test_nothing_overflows_while_a_refreshed_block_waits_for_pages() -> None:
    rig = hybrid_rig(num_colocated=1, num_pages=16, overload_threshold=24)
    hand_over(rig, tokens(rig, 40))
    large = tokens(rig, 28)
    rig.progress(0, refreshed=(large.key,))
    assert large.status is Status.WAITING_DECODE
    assert tokens(rig, 24).refresher_id == 0
    assert tokens(rig, 8).status is Status.PENDING


def test_without_a_prefill_worker_everything_overflows() -> None:
    rig = hybrid_rig(num_colocated=1)
    rig.lose(0)
    tracked = tokens(rig, 20)
    assert (tracked.refresher_id, tracked.worker_id) == (None, 1)
