"""Workers that are lost, hang, or come back, as the scheduler sees them."""

from __future__ import annotations

import pytest

from dbench.errors import ServerUnavailable
from dbench.events import WorkerLost, WorkerUp
from dbench.serve.sequence import Status
from tests.serve.scheduler_builders import MASK_ID, Rig, done, rules


def test_blocks_of_a_lost_worker_are_restarted_elsewhere() -> None:
    rig = Rig()
    first, second = rig.submit(), rig.submit()
    assert [first.worker_id, second.worker_id] == [0, 1]
    rig.lose(0)
    assert [first.worker_id, second.worker_id] == [1, 1]
    assert (first.attempt, second.attempt) == (1, 0)
    assert [event.worker_id for event in rig.of(WorkerLost)] == [0]


def test_a_lost_worker_counts_against_the_blocks_that_it_ran() -> None:
    rig = Rig(num_workers=3, given=rules(retries=1))
    tracked = rig.submit()
    for worker_id in (0, 1):
        rig.lose(worker_id)
    assert tracked.status is Status.ERROR
    assert tracked.error == "block 0 failed 2 times, last on worker 1: worker 1 was lost: its stream ended"
    assert not any(task.alone for _, task in rig.tasks())


def test_when_no_worker_is_left_every_request_ends_with_the_reason() -> None:
    rig = Rig(num_workers=1)
    tracked = rig.submit()
    rig.lose(0, "its process ended (killed by signal 9)")
    assert tracked.status is Status.ERROR
    assert "no worker is left; worker 0 was lost: its process ended (killed by signal 9)" in tracked.error
    with pytest.raises(ServerUnavailable, match="no worker is left"):
        rig.submit()


def test_requests_wait_for_a_lost_worker_that_is_started_again() -> None:
    rig = Rig(num_workers=1)
    rig.fleet.awaits_lost = True
    tracked = rig.submit((1,), 8)
    rig.finish_block()
    rig.lose(0)
    assert tracked.status is Status.WAITING_NEXT_BLOCK
    assert [worker.state for worker in rig.fleet.statuses()] == ["starting"]
    late = rig.submit()
    assert late.status is Status.PENDING
    rig.restart(0)
    rig.ready(0)
    assert [(task.key.request_id, task.key.block_index, task.key.attempt) for _, task in rig.tasks()][2:] == [
        ("r0", 1, 1),
        ("r1", 0, 0),
    ]
    assert [event.worker_id for event in rig.of(WorkerUp)] == [0, 0]


def test_a_worker_that_is_given_up_ends_the_requests_that_waited_for_it() -> None:
    rig = Rig(num_workers=1)
    rig.fleet.awaits_lost = True
    tracked = rig.submit()
    rig.lose(0)
    rig.give_up(0, "could not be started again 5 times in a row: no such file")
    assert tracked.status is Status.ERROR
    assert "no worker is left; worker 0 could not be started again 5 times in a row: no such file" in tracked.error
    with pytest.raises(ServerUnavailable, match="no worker is left"):
        rig.submit()


def test_a_restart_that_fails_is_a_loss_too() -> None:
    rig = Rig(num_workers=1)
    rig.fleet.awaits_lost = True
    rig.now_s += 12.5
    rig.lose(0)
    ready_for_s = [rig.fleet[0].ready_for_s]
    rig.restart(0)
    rig.lose(0, "its process ended (exit code 2)")
    ready_for_s.append(rig.fleet[0].ready_for_s)
    assert ready_for_s == [12.5, None]
    rig.restart(0)
    rig.ready(0)
    assert rig.submit().worker_id == 0


def test_what_a_lost_worker_says_late_changes_nothing() -> None:
    rig = Rig(num_workers=1)
    rig.fleet.awaits_lost = True
    tracked = rig.submit()
    _, task = rig.last_task()
    rig.lose(0)
    rig.restart(0)
    rig.ready(0)
    rig.progress(0, done(task, (66, 67, 68, 69)))
    assert (tracked.status, tracked.num_gen_tokens) == (Status.PREFILLING, 0)
    rig.finish_block()
    assert tracked.poll_state(MASK_ID).generated_token_ids == (10, 11, 12, 13)


def test_a_worker_that_is_silent_for_too_long_is_lost() -> None:
    rig = Rig()
    rig.submit()
    for _ in range(32):
        rig.progress(1)
        rig.look(1.0)
    assert [worker_id for worker_id, _ in rig.tasks()] == [0, 1]
    assert [event.reason for event in rig.of(WorkerLost)] == [
        "nothing was heard of it for 31.0 s, worker_timeout_s is 30"
    ]


def test_a_worker_whose_iteration_takes_too_long_is_lost() -> None:
    rig = Rig()
    for age_s in (29.5, 30.5):
        assert rig.of(WorkerLost) == []
        rig.progress(0, iteration_age_s=age_s)
        rig.progress(1)
        rig.look(1.0)
    assert [(event.worker_id, event.reason) for event in rig.of(WorkerLost)] == [
        (0, "its iteration 2 has run for 30.5 s, worker_timeout_s is 30")
    ]


def test_a_scheduler_that_slept_takes_nobody_for_lost() -> None:
    rig = Rig()
    rig.look(1.0)
    rig.look(3600.0)
    assert rig.of(WorkerLost) == []


def test_a_worker_that_starts_is_given_its_time() -> None:
    rig = Rig(num_workers=1, ready=False)
    for _ in range(100):
        rig.look(1.0)
    rig.ready(0)
    rig.look(1.0)
    assert rig.of(WorkerLost) == []


def test_nobody_waits_for_starting_workers_once_the_others_are_drained() -> None:
    rig = Rig(num_workers=2)
    rig.fleet.awaits_lost = True
    rig.lose(1)
    rig.scheduler.drain_workers(rig.now_s)
    assert [worker.state for worker in rig.fleet.statuses()] == ["draining", "ended"]


def test_a_lost_worker_is_lost_once() -> None:
    rig = Rig()
    rig.lose(0)
    rig.lose(0)
    assert len(rig.of(WorkerLost)) == 1
