"""A block that must be alone: nothing runs beside it, nothing overtakes it, and nothing waits for ever."""

from __future__ import annotations

import pytest

from dbench.serve.fake_runner import FakeScript
from dbench.serve.policy import num_that_may_join
from dbench.serve.sequence import BlockOutcome, Fault
from tests.serve.engine_builders import RANDOM, Rig, make_rig, make_task, quota

BOTH_DRIVERS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def sizes(rig: Rig) -> list[int]:
    return [len(spans) for spans in rig.runner.launches]


@pytest.mark.parametrize(
    ("waiting", "running", "wanted"),
    [
        ("", "", 3),
        ("bb", "bb", 3),
        ("A", "", 1),
        ("Ab", "", 1),
        ("A", "b", 0),
        ("bA", "", 1),
        ("bbAb", "b", 2),
        ("bbbA", "", 3),
        ("b", "A", 0),
        ("A", "A", 0),
    ],
)
def test_the_front_of_the_queue_joins_as_far_as_nobody_in_it_is_alone(waiting: str, running: str, wanted: int) -> None:
    """A is a block that must be alone, b any other; three slots are free."""
    queue, companions = ([make_task(alone=letter == "A") for letter in letters] for letters in (waiting, running))
    assert num_that_may_join(queue, companions, 3) == wanted


def test_without_a_free_slot_nobody_joins() -> None:
    assert num_that_may_join([make_task(alone=True)], [], 0) == 0


@BOTH_DRIVERS
def test_it_waits_for_those_that_run_and_those_behind_it_wait_for_it(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    ends = rig.run([make_task("a"), make_task("b", alone=True), make_task("c"), make_task("d")])
    assert [end.outcome for end in ends] == [BlockOutcome.DONE] * 4
    assert sizes(rig) == [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    refreshed = [task.key.request_id for task in rig.runner.attached]
    assert refreshed == ["a", "b", "c", "d"]


@BOTH_DRIVERS
def test_it_starts_at_once_in_an_empty_engine_however_long_its_canvas(overlap: bool) -> None:
    rig = make_rig(overlap=overlap, max_tokens_per_iteration=8)
    (end,) = rig.run([make_task(prompt=100, alone=True)])
    assert end.outcome is BlockOutcome.DONE
    assert set(sizes(rig)) == {1}


@BOTH_DRIVERS
def test_two_of_them_run_one_after_the_other(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    rig.run([make_task("a", alone=True), make_task("b", alone=True)])
    assert set(sizes(rig)) == {1}


def test_with_overlap_it_waits_for_the_void_span_of_the_one_before() -> None:
    rig = make_rig(FakeScript(num_unmasked=lambda task, step: 2, lag_s=1.0), overlap=True)
    rig.run([make_task("a", sampling=RANDOM), make_task("b", sampling=RANDOM, alone=True)])
    assert rig.runner.calls.index("launch 3") > rig.runner.calls.index("collect 2")


def test_one_that_is_cancelled_lets_the_others_in() -> None:
    rig = make_rig()
    for task in (make_task("a"), make_task("b", alone=True), make_task("c")):
        rig.engine.submit(task)
    rig.step()
    rig.engine.cancel(make_task("b").key)
    rig.step()
    assert sizes(rig) == [1, 2]
    rig.drain()


def test_waiting_for_others_to_end_saves_no_budget() -> None:
    rig = make_rig(max_tokens_per_iteration=100)
    rig.run([make_task("a"), make_task("b", alone=True)])
    assert {state.deficit_tokens for state in rig.states} == {0}


@BOTH_DRIVERS
def test_ends_say_whose_failure_it_was(overlap: bool) -> None:
    script = FakeScript(non_finite=frozenset({("a", 0, 1)}), poisonous=frozenset({"b"}))
    rig = make_rig(script, overlap=overlap)
    done, own, batch = rig.run([make_task("c", sampling=quota(4)), make_task("a"), make_task("b", alone=True)])
    assert [end.fault for end in (done, own, batch)] == [Fault.NONE, Fault.OWN, Fault.BATCH]
