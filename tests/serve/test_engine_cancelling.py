"""What becomes of a block that is cancelled: where it waits, while it runs, and after its end."""

from __future__ import annotations

from dbench.serve.sequence import BlockEnd, BlockKey
from tests.serve.engine_builders import RANDOM, make_rig, make_task
from tests.serve.test_engine import BOTH_DRIVERS, CANCELLED, DONE, two_per_step


@BOTH_DRIVERS
def test_a_waiting_block_is_cancelled_at_once(overlap: bool) -> None:
    rig = make_rig(overlap=overlap, max_batch_size=1)
    rig.engine.submit(make_task("a"))
    rig.engine.submit(make_task("b"))
    rig.step()
    rig.engine.cancel(make_task("b").key)
    rig.step()
    assert rig.ends[make_task("b").key] == BlockEnd(make_task("b").key, CANCELLED, (), False, "", None, ())
    assert rig.drain()[make_task("a").key].outcome is DONE


def test_an_engine_with_nothing_but_a_cancelled_block_still_reports_it() -> None:
    rig = make_rig()
    rig.engine.submit(make_task())
    rig.engine.cancel(make_task().key)
    assert not rig.engine.is_idle
    assert rig.step()
    assert list(rig.ends) == [make_task().key]
    assert not rig.step()


@BOTH_DRIVERS
def test_a_running_block_is_dropped_once_its_steps_are_collected(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    rig.engine.submit(make_task())
    rig.step()
    rig.step()
    rig.engine.cancel(make_task().key)
    end = rig.drain()[make_task().key]
    assert (end.outcome, end.token_ids) == (CANCELLED, ())
    assert end.times is not None
    assert len(end.steps) == len(rig.runner.launches) == 2
    assert rig.runner.slots == {}


def test_cancelling_an_unknown_block_does_nothing() -> None:
    rig = make_rig()
    rig.engine.cancel(BlockKey("nobody", 0, 0))
    assert rig.engine.is_idle


def test_a_block_that_ended_before_it_was_cancelled_is_reported_as_done() -> None:
    rig = make_rig(two_per_step(), overlap=True)
    rig.engine.submit(make_task(sampling=RANDOM))
    for _ in range(3):
        rig.step()
    assert rig.ends == {}
    rig.engine.cancel(make_task().key)
    assert rig.drain()[make_task().key].outcome is DONE


def test_cancelling_the_last_waiting_block_forgets_the_deficit() -> None:
    rig = make_rig(max_tokens_per_iteration=20)
    rig.engine.submit(make_task("a"))
    rig.engine.submit(make_task("b", prompt=16))
    rig.step()
    assert rig.states[-1].deficit_tokens == 8
    rig.engine.cancel(make_task("b").key)
    rig.events += rig.engine.take_events()
    assert rig.states[-1].deficit_tokens == 0
