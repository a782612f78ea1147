"""The scheduler by hand-worked cases: what is sent to whom, and what a client sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbench.errors import QueueFullError, RequestError
from dbench.events import (
    BatchExecuted,
    BlockFinished,
    BlockRouted,
    RequestArrived,
    RequestFinished,
    SchedulerDepth,
    WorkerLost,
    WorkerState,
    WorkerUp,
    event_to_json,
)
from dbench.serve.finished import Retention
from dbench.serve.sequence import BlockKey, Fault, Status, derive_request_seed
from dbench.serve.wire import NOT_FOUND, FinishedBlock
from dbench.serve.wire_link import CancelBlock, Drain
from tests.serve.scheduler_builders import BLOCK, LIMITS, MASK_ID, Rig, cancelled, done, failed, rules


def test_the_first_block_carries_the_canvas_and_the_defaults() -> None:
    rig = Rig()
    rig.submit((1, 2, 3), 12)
    worker_id, task = rig.last_task()
    assert worker_id == 0
    assert task.key == BlockKey("r0", 0, 0)
    assert (task.token_ids, task.num_masks, task.num_remaining_blocks) == ((1, 2, 3), 12, 3)
    assert task.sampling.confidence_threshold == 0.9
    assert task.request_seed == derive_request_seed((1, 2, 3), 12, task.sampling, BLOCK)


def test_with_max_gen_len_every_canvas_carries_as_many_masks() -> None:
    rig = Rig(given=rules(replace(LIMITS, max_gen_len=16)))
    tracked = rig.submit((1, 2), 4)
    assert rig.last_task()[1].canvas_length == 18
    rig.finish_block()
    state = rig.scheduler.poll("r0", rig.now_s)
    assert tracked.status is Status.COMPLETED
    assert state.sequence == (1, 2, 10, 11, 12, 13) + (MASK_ID,) * 12
    assert state.generated_token_ids == (10, 11, 12, 13)


def test_a_finished_block_is_appended_and_the_next_one_goes_to_the_next_worker() -> None:
    rig = Rig()
    rig.submit((1, 2, 3), 8)
    rig.finish_block()
    worker_id, task = rig.last_task()
    assert worker_id == 1
    assert task.key == BlockKey("r0", 1, 0)
    assert (task.token_ids, task.num_masks, task.num_remaining_blocks) == ((1, 2, 3, 10, 11, 12, 13), 4, 1)


def test_statuses_come_in_order() -> None:
    rig = Rig(num_workers=1, ready=False)
    tracked = rig.submit((1,), 8)
    seen = [tracked.status]
    rig.ready(0)
    seen.append(tracked.status)
    rig.progress(0, refreshed=(tracked.key,))
    seen.append(tracked.status)
    rig.finish_block()
    seen.append(tracked.status)
    rig.progress(0, refreshed=(tracked.key,))
    rig.finish_block()
    seen.append(tracked.status)
    assert seen == [Status.PENDING, Status.PREFILLING, Status.DECODING, Status.PREFILLING, Status.COMPLETED]


def test_poll_shows_finished_blocks_only() -> None:
    rig = Rig()
    tracked = rig.submit((1, 2), 8)
    rig.now_s = 107.0
    worker_id, task = rig.last_task()
    rig.progress(worker_id, done(task, (10, 11, 12, 13)), worker_now_s=7.0)
    state = rig.scheduler.poll("r0", rig.now_s)
    assert state.sequence == (1, 2, 10, 11, 12, 13) + (MASK_ID,) * 4
    assert (state.status, state.num_prompt_tokens, state.num_forward_passes) == ("PREFILLING", 2, 2)
    assert (state.arrival_s, state.first_refresh_s, state.completion_s) == (100.0, 101.0, None)
    assert state.generated_token_ids == ()
    assert tracked.finished_blocks(0) == (FinishedBlock(0, (10, 11, 12, 13)),)
    assert tracked.finished_blocks(1) == ()


def test_a_request_ends_after_the_block_with_its_first_end_of_text() -> None:
    rig = Rig()
    tracked = rig.submit((1,), 12)
    worker_id, task = rig.last_task()
    rig.progress(worker_id, done(task, (10, 99), found_eos=True))
    assert tracked.status is Status.COMPLETED
    assert tracked.poll_state(MASK_ID).generated_token_ids == (10, 99)
    assert len(list(rig.tasks())) == 1


def test_with_ignore_eos_an_end_of_text_ends_nothing() -> None:
    rig = Rig()
    tracked = rig.submit((1,), 8, ignore_eos=True)
    worker_id, task = rig.last_task()
    rig.progress(worker_id, done(task, (10, 99, 11, 12), found_eos=True))
    assert tracked.status is Status.PREFILLING
    assert rig.last_task()[1].key.block_index == 1


def test_a_block_whose_batch_failed_is_restarted_alone_on_another_worker_from_the_last_finished_block() -> None:
    rig = Rig(policy="least_outstanding_prefill_tokens")
    rig.submit((1,), 8)
    rig.finish_block()
    worker_id, task = rig.last_task()
    rig.progress(worker_id, failed(task))
    other_id, again = rig.last_task()
    assert other_id != worker_id
    assert again == replace(task, key=BlockKey("r0", 1, 1), alone=True)


def test_a_block_that_is_itself_at_fault_ends_its_request_at_once() -> None:
    rig = Rig(given=rules(retries=2))
    tracked = rig.submit()
    worker_id, task = rig.last_task()
    rig.progress(worker_id, failed(task, "block 0, step 2: non-finite logits", Fault.OWN))
    assert tracked.status is Status.ERROR
    assert tracked.error == "block 0, step 2: non-finite logits"
    assert len(list(rig.tasks())) == 1


def test_only_failures_alone_count_and_too_many_end_the_request_with_the_reason() -> None:
    rig = Rig(given=rules(retries=2))
    tracked = rig.submit()
    for _ in range(4):
        worker_id, task = rig.last_task()
        rig.progress(worker_id, failed(task, "block 0, step 2: batch failed: RuntimeError"))
    assert tracked.status is Status.ERROR
    assert tracked.error == (
        f"block 0 failed 3 times, last on worker {worker_id}: block 0, step 2: batch failed: RuntimeError"
    )
    assert [(task.key.attempt, task.alone) for _, task in rig.tasks()] == [(0, False), (1, True), (2, True), (3, True)]


def test_the_block_after_one_that_ran_alone_has_company_again() -> None:
    rig = Rig(given=rules(retries=1))
    tracked = rig.submit((1,), 8)
    for _ in range(2):
        worker_id, task = rig.last_task()
        rig.progress(worker_id, failed(task))
        rig.finish_block()
    assert [(task.key.block_index, task.alone) for _, task in rig.tasks()] == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    assert tracked.status is Status.COMPLETED


def test_without_retries_a_failure_in_company_is_still_tried_alone() -> None:
    rig = Rig(given=rules(retries=0))
    tracked = rig.submit()
    for _ in range(2):
        worker_id, task = rig.last_task()
        rig.progress(worker_id, failed(task, "boom"))
    assert tracked.error == f"block 0 failed once, last on worker {worker_id}: boom"


def test_requests_wait_while_a_worker_may_still_come() -> None:
    rig = Rig(num_workers=2, ready=False)
    tracked = rig.submit()
    rig.lose(0)
    assert tracked.status is Status.PENDING
    rig.ready(1)
    assert tracked.worker_id == 1


def test_waiting_requests_are_routed_in_the_order_of_their_submission() -> None:
    rig = Rig(num_workers=1, ready=False)
    for _ in range(3):
        rig.submit()
        rig.now_s -= 1.0
    rig.ready(0)
    assert [task.key.request_id for _, task in rig.tasks()] == ["r0", "r1", "r2"]


def test_an_end_of_another_attempt_is_dropped() -> None:
    rig = Rig()
    tracked = rig.submit()
    worker_id, task = rig.last_task()
    rig.progress(worker_id, failed(task))
    rig.progress(worker_id, done(task, (66, 67, 68, 69)))
    assert tracked.status is Status.PREFILLING
    assert tracked.num_gen_tokens == 0
    rig.finish_block()
    assert tracked.poll_state(MASK_ID).generated_token_ids == (10, 11, 12, 13)


def test_an_end_from_a_worker_that_does_not_hold_the_block_is_dropped() -> None:
    rig = Rig()
    tracked = rig.submit()
    _, task = rig.last_task()
    rig.progress(1, done(task, (66, 67, 68, 69)), refreshed=(task.key,))
    assert tracked.status is Status.PREFILLING


def test_a_block_with_too_few_ids_counts_as_failed() -> None:
    rig = Rig(given=rules(retries=0))
    tracked = rig.submit()
    worker_id, task = rig.last_task()
    rig.progress(worker_id, done(task, (1, 2, 3)))
    assert "returned 3 ids for a block of 4" in tracked.error


def test_cancelling_a_running_block_tells_its_worker_and_frees_it_when_the_worker_answers() -> None:
    rig = Rig()
    tracked = rig.submit()
    worker_id, task = rig.last_task()
    assert rig.cancel("r0") == "CANCELLED"
    assert rig.commands[-1] == (worker_id, CancelBlock(task.key))
    assert rig.fleet[worker_id].load().num_requests == 1
    rig.progress(worker_id, cancelled(task))
    assert rig.fleet[worker_id].load().num_requests == 0
    assert rig.fleet[worker_id].load().length_sum == 0
    assert tracked.status is Status.CANCELLED


def test_a_block_that_ends_after_its_cancel_changes_nothing() -> None:
    rig = Rig()
    tracked = rig.submit()
    worker_id, task = rig.last_task()
    rig.cancel("r0")
    rig.progress(worker_id, done(task, (10, 11, 12, 13)))
    assert tracked.status is Status.CANCELLED
    assert tracked.num_gen_tokens == 0
    assert len(rig.of(RequestFinished)) == 1


def test_cancelling_a_waiting_request_sends_nothing() -> None:
    rig = Rig(ready=False)
    rig.submit()
    assert rig.cancel("r0") == "CANCELLED"
    rig.ready(0)
    assert rig.commands == []
    assert rig.scheduler.num_pending == 0


def test_cancelling_a_final_or_unknown_request_says_how_it_stands() -> None:
    rig = Rig()
    rig.submit()
    rig.finish_block()
    assert rig.cancel("r0") == "COMPLETED"
    assert rig.cancel("nobody") == NOT_FOUND
    assert rig.scheduler.poll("nobody", rig.now_s).status == NOT_FOUND


def test_the_server_takes_max_queued_requests_at_a_time() -> None:
    rig = Rig(given=rules(queued=2))
    rig.submit()
    rig.submit()
    with pytest.raises(QueueFullError, match="holds 2 requests"):
        rig.submit()
    rig.cancel("r0")
    rig.submit()


def test_a_refused_request_leaves_no_trace() -> None:
    rig = Rig()
    with pytest.raises(RequestError):
        rig.submit(gen_length=5)
    assert rig.scheduler.num_in_server == 0
    assert rig.of(RequestArrived) == []


def test_finished_requests_are_forgotten_by_age_and_by_number() -> None:
    rig = Rig(given=rules(kept=Retention(60.0, 2)))
    for _ in range(4):
        rig.submit()
        rig.finish_block()
    known = [rig.scheduler.poll(f"r{i}", rig.now_s).status for i in range(4)]
    assert known == [NOT_FOUND, NOT_FOUND, "COMPLETED", "COMPLETED"]
    assert rig.scheduler.poll("r3", rig.now_s + 61.0).status == NOT_FOUND


def test_loads_follow_what_was_given() -> None:
    rig = Rig(num_workers=2, policy="least_outstanding_prefill_tokens")
    long = rig.submit((1,) * 20, 4)
    assert long.worker_id is not None
    other = 1 - long.worker_id
    rig.submit((1,) * 3, 4)
    rig.submit((1,) * 3, 4)
    assert rig.fleet[long.worker_id].load().outstanding_prefill_tokens == 24
    assert (rig.fleet[other].load().length_sum, rig.fleet[other].load().num_requests) == (14, 2)


def test_draining_workers_get_nothing_new_and_their_end_is_no_loss() -> None:
    rig = Rig(num_workers=1)
    rig.scheduler.drain_workers(rig.now_s)
    rig.take()
    assert rig.commands == [(0, Drain())]
    rig.lose(0, "its stream ended")
    assert rig.of(WorkerLost) == []
    assert rig.fleet.statuses()[0].state == "ended"


def test_cancel_all_gives_everybody_the_reason() -> None:
    rig = Rig()
    running, other = rig.submit(), rig.submit()
    rig.scheduler.cancel_all("the server was stopped", rig.now_s)
    assert [running.status, other.status] == [Status.CANCELLED] * 2
    assert running.error == other.error == "the server was stopped"


def test_events_tell_the_story_of_a_request_on_the_schedulers_clock() -> None:
    rig = Rig(num_workers=1)
    rig.submit()
    worker_id, task = rig.last_task()
    rig.now_s = 110.0
    rig.progress(worker_id, done(task, (10, 11, 12, 13)), worker_now_s=10.0)
    kinds = [type(event) for event in rig.events]
    assert kinds == [WorkerUp, RequestArrived, BlockRouted, BlockFinished, RequestFinished]
    assert {event.source for event in rig.events} == {"scheduler"}
    block = rig.events[3]
    assert isinstance(block, BlockFinished)
    assert (block.ready_s, block.routed_s, block.at_s) == (100.0, 100.0, 110.0)
    assert (block.received_s, block.refresh_start_s, block.end_s) == (100.5, 101.0, 103.0)
    assert (block.step_end_s, block.step_num_unmasked) == ((102.0, 103.0), (1, 3))


def test_the_depth_is_recorded_at_every_change() -> None:
    rig = Rig(num_workers=1, ready=False)
    rig.submit((1,), 4)
    rig.submit((1, 2), 4)
    rig.ready(0)
    depths = [(e.pending_requests, e.pending_prefill_tokens) for e in rig.of(SchedulerDepth)]
    assert depths == [(1, 5), (2, 11), (0, 0)]


def state_line(at_s: float) -> str:
    return event_to_json(WorkerState(at_s, "worker-0", 0, "busy", 3, 2, 50, 20, 7, 32, 0))


def test_worker_events_are_brought_to_the_schedulers_clock_by_the_smallest_offset() -> None:
    rig = Rig(num_workers=1)
    batch = BatchExecuted(12.0, "worker-0", 0, 11.0, 1, 4, 0, 0, 1, None, 0.1)
    rig.now_s = 110.5
    rig.progress(0, worker_now_s=10.0)
    rig.now_s = 112.1
    rig.progress(0, lines=(event_to_json(batch),), worker_now_s=12.0)
    rig.now_s = 115.0
    rig.progress(0, lines=(state_line(14.0),), worker_now_s=14.0)
    moved = rig.of(BatchExecuted)[0]
    assert (moved.at_s, moved.start_s) == pytest.approx((112.1, 111.1))
    assert rig.of(WorkerState)[0].at_s == pytest.approx(114.1)


def test_status_shows_the_last_state_of_a_worker() -> None:
    rig = Rig(num_workers=2, ready=False)
    rig.ready(0)
    rig.progress(0, lines=(state_line(1.0),))
    first, second = rig.fleet.statuses()
    assert (first.ready, first.state, first.pages_used, first.pages_total) == (True, "busy", 7, 32)
    assert (first.queue_depth_waiting, first.queue_depth_active, first.pid) == (3, 2, 1000)
    assert (second.ready, second.state) == (False, "starting")


def test_counters_of_a_worker_count_steps_and_returned_tokens() -> None:
    rig = Rig(num_workers=1)
    rig.submit((1,), 8)
    rig.finish_block()
    rig.finish_block()
    (worker,) = rig.fleet.statuses()
    assert (worker.num_forward_passes, worker.num_unmasked_tokens) == (4, 8)


def test_an_event_that_is_none_is_refused() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="unknown event kind"):
        rig.progress(0, lines=('{"kind":"nonsense"}',))
