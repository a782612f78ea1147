"""Workers of other hosts, as the scheduler sees them: they come, go and come back as they like."""

from __future__ import annotations

import pytest

from dbench.events import WorkerLeft, WorkerLost, WorkerUp
from dbench.options import COLOCATED, PREFILL
from dbench.serve.fleet import WorkerPhase
from dbench.serve.sequence import Status
from dbench.serve.wire_link import Drain, Hello
from tests.serve.scheduler_builders import MASK_ID, STARTUP_TIMEOUT_S, TIMEOUT_S, Hybrid, Rig, cancelled, done, rules


def test_a_worker_that_joins_gets_a_number_and_blocks() -> None:
    rig = Rig(num_workers=1)
    assert rig.join("a") == 1
    assert [rig.submit().worker_id for _ in range(2)] == [0, 1]
    assert [worker.device for worker in rig.fleet.statuses()] == ["cpu", "cpu on host of a"]


def test_a_server_that_expects_remote_workers_is_complete_when_they_are_ready() -> None:
    rig = Rig(num_workers=1, num_remote=2)
    assert rig.states() == ["idle", "awaited", "awaited"]
    completeness = [rig.fleet.is_complete]
    for instance in ("a", "b"):
        rig.join(instance)
        completeness.append(rig.fleet.is_complete)
    assert completeness == [False, False, True]


def test_one_more_than_expected_is_welcome_and_not_waited_for() -> None:
    rig = Rig(num_workers=0, num_remote=1)
    assert [rig.join("a"), rig.join("b")] == [0, 1]
    rig.lose(1)
    assert rig.fleet.is_complete
    assert rig.states() == ["idle", "awaited"]


def test_requests_wait_for_an_expected_worker() -> None:
    rig = Rig(num_workers=0, num_remote=1)
    tracked = rig.submit()
    statuses = [tracked.status]
    rig.join("a")
    statuses.append(tracked.status)
    assert statuses == [Status.PENDING, Status.PREFILLING]


def test_a_lost_worker_that_dials_again_has_its_number_again() -> None:
    rig = Rig(num_workers=1)
    first, second = rig.join("a"), rig.join("b")
    rig.lose(first)
    rig.lose(second)
    assert rig.join("b") == second
    assert rig.join("a") == first
    assert [event.worker_id for event in rig.of(WorkerUp)] == [0, first, second, second, first]
    assert [worker.num_losses for worker in rig.fleet.statuses()] == [0, 1, 1]


def test_a_new_worker_takes_the_place_of_one_that_is_away() -> None:
    rig = Rig(num_workers=1)
    rig.join("a")
    rig.lose(1)
    assert rig.join("b") == 1
    assert rig.join("a") == 2


def test_what_a_worker_of_another_host_says_late_changes_nothing() -> None:
    rig = Rig(num_workers=0, num_remote=1)
    rig.join("a")
    tracked = rig.submit()
    _, task = rig.last_task()
    rig.lose(0, "nothing was heard of it for 31.0 s")
    rig.join("a")
    rig.progress(0, done(task, (66, 67, 68, 69)))
    assert (tracked.status, tracked.num_gen_tokens) == (Status.PREFILLING, 0)
    rig.finish_block()
    assert tracked.poll_state(MASK_ID).generated_token_ids == (10, 11, 12, 13)


def test_a_worker_that_leaves_finishes_what_it_runs_and_gets_nothing_new() -> None:
    rig = Rig(num_workers=1)
    rig.join("a")
    first, second = rig.submit(), rig.submit()
    rig.leave(1)
    assert rig.commands[-1] == (1, Drain())
    assert rig.states()[1] == "draining"
    assert [rig.submit().worker_id for _ in range(3)] == [0, 0, 0]
    rig.progress(1, done(next(task for worker_id, task in rig.tasks() if worker_id == 1), (5, 6, 7, 8)))
    assert (first.status, second.status) == (Status.PREFILLING, Status.COMPLETED)
    rig.lose(1)
    assert rig.states() == ["idle", "ended"]
    assert (rig.of(WorkerLost), [event.worker_id for event in rig.of(WorkerLeft)]) == ([], [1])


def test_what_a_leaving_worker_hands_back_costs_the_request_no_retry() -> None:
    rig = Rig(num_workers=1, given=rules(retries=0))
    rig.join("a")
    rig.submit()
    handed_back, cut_off = rig.submit(), rig.submit((1,), 8)
    rig.scheduler.cancel(cut_off.request.request_id, rig.now_s)
    tasks = [task for worker_id, task in rig.tasks() if worker_id == 1]
    rig.leave(1)
    rig.progress(1, *(cancelled(task) for task in tasks))
    assert (handed_back.worker_id, handed_back.attempt, handed_back.num_failures) == (0, 1, 0)


def test_a_worker_that_ends_in_its_drain_costs_the_request_no_retry() -> None:
    rig = Rig(num_workers=1, given=rules(retries=0))
    rig.join("a")
    rig.submit()
    tracked = rig.submit()
    rig.leave(1)
    rig.lose(1, "its stream ended")
    assert (tracked.worker_id, tracked.attempt, tracked.num_failures) == (0, 1, 0)
    assert not tracked.alone


def test_an_expected_worker_that_left_is_awaited_and_another_only_if_it_was_lost() -> None:
    rig = Rig(num_workers=0, num_remote=1)
    for instance in ("a", "b", "c"):
        rig.join(instance)
    for worker_id in (0, 1):
        rig.leave(worker_id)
        rig.lose(worker_id)
    rig.lose(2)
    assert rig.states() == ["awaited", "ended", "awaited"]


def test_a_worker_that_stays_away_is_given_up_after_the_startup_timeout() -> None:
    rig = Rig(num_workers=0, num_remote=1)
    rig.join("a")
    tracked = rig.submit()
    rig.lose(0)
    for _ in range(int(STARTUP_TIMEOUT_S) + 1):
        assert tracked.status is Status.PENDING
        rig.look(1.0)
    rig.look(1.0)
    assert tracked.status is Status.ERROR
    assert "no worker is left; worker 0 did not come within startup_timeout_s 60" in tracked.error
    assert rig.states() == ["lost"]
    assert rig.join("a") == 0
    assert rig.submit().worker_id == 0


def test_a_worker_that_joins_and_never_gets_ready_is_lost() -> None:
    rig = Rig(num_workers=1)
    rig.fleet.join(Hello("key", None, "cpu", 7, instance="a"))
    for _ in range(int(STARTUP_TIMEOUT_S) + 2):
        for worker_id in [worker.worker_id for worker in rig.fleet.in_phase(WorkerPhase.STARTING, WorkerPhase.READY)]:
            rig.progress(worker_id)  # a heartbeat, also while the model is loaded
        rig.look(1.0)
    assert [(event.worker_id, event.reason) for event in rig.of(WorkerLost)] == [
        (1, "it was not ready within startup_timeout_s 60")
    ]


@pytest.mark.parametrize("sign", ["hangs", "is silent"])
def test_a_leaving_worker_that_hangs_is_let_go_and_its_blocks_go_on_elsewhere(sign: str) -> None:
    rig = Rig(num_workers=1, num_remote=1, policy="round_robin")
    assert rig.join("a") == 1
    requests = [rig.submit() for _ in range(2)]
    rig.leave(1)
    for age_s in range(int(TIMEOUT_S) + 2):
        rig.progress(0)
        if sign == "hangs":
            rig.progress(1, iteration_age_s=age_s)
        rig.look(1.0)
    assert [event.worker_id for event in rig.of(WorkerLeft)] == [1]
    assert [(tracked.worker_id, tracked.num_failures) for tracked in requests] == [(0, 0)] * 2


def test_the_clock_of_another_host_may_run_slow() -> None:
    rig = Rig(num_workers=1, num_remote=1)
    assert rig.join("a") == 1
    offsets = []
    for _ in range(1000):
        rig.now_s += 1.0
        for worker_id in (0, 1):
            rig.progress(worker_id, worker_now_s=rig.now_s * (1 - 5e-5) - 7.0)
        offsets.append([rig.fleet[worker_id].clock_offset_s for worker_id in (0, 1)])
    true_s = rig.now_s * 5e-5 + 7.0
    assert offsets[-1][0] == offsets[0][0]  # clocks of one host have one pace, and the shortest way is the best
    assert offsets[-1][1] == pytest.approx(true_s, abs=1e-6)


def test_nobody_is_awaited_while_the_server_ends() -> None:
    rig = Rig(num_workers=0, num_remote=2)
    rig.join("a")
    rig.scheduler.drain_workers(rig.now_s)
    rig.lose(0)
    assert rig.states() == ["ended", "ended"]


def test_a_worker_that_joins_takes_a_place_of_its_kind() -> None:
    rig = Rig(hybrid=Hybrid(num_prefill=0, num_colocated=1, num_remote_prefill=1))
    assert rig.join("a") == 2
    completeness = [rig.fleet.is_complete]
    assert rig.join("b", PREFILL) == 1
    assert [*completeness, rig.fleet.is_complete] == [False, True]
    rig.lose(2)
    assert [rig.join("c", PREFILL), rig.join("d")] == [3, 2]
    assert [worker.kind for worker in rig.fleet.statuses()] == [COLOCATED, PREFILL, COLOCATED, PREFILL]


def test_workers_are_counted_by_kind() -> None:
    rig = Rig(hybrid=Hybrid(num_prefill=1, num_colocated=2, num_remote_prefill=1))
    rig.join("a")
    counts = [(count.kind, count.expected, count.ready) for count in rig.fleet.counts()]
    assert counts == [(PREFILL, 2, 1), (COLOCATED, 2, 3)]
    assert [(count.kind, count.expected) for count in Rig(num_remote=1).fleet.counts()] == [(COLOCATED, 3)]


def test_requests_wait_for_a_prefill_worker_where_nobody_else_refreshes() -> None:
    rig = Rig(hybrid=Hybrid(num_prefill=0, num_colocated=1, num_remote_prefill=1, overflow=False))
    tracked = rig.submit()
    statuses = [tracked.status, rig.fleet.can_work]
    rig.join("a", PREFILL)
    assert [*statuses, tracked.status, rig.fleet.can_work] == [Status.PENDING, False, Status.PREFILLING, True]
