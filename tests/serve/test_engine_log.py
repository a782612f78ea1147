"""Blocks that come while a batch runs have waited since they came, and the depths say so."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.events import BatchExecuted, WorkerState
from dbench.serve.engine_log import Depths, EngineLog
from dbench.serve.sequence import BlockTimes
from tests.serve.engine_builders import make_rig, make_task, quota


def test_a_block_that_came_during_a_batch_has_waited_since_then() -> None:
    rig = make_rig()
    rig.engine.submit(make_task("a", sampling=quota(4)))
    rig.engine.step()
    rig.engine.submit(make_task("b", sampling=quota(4)), received_s=0.25)
    end = rig.drain()[make_task("b").key]
    assert end.times == BlockTimes(0.25, refresh_start_s=1.0, refresh_end_s=2.0, decode_start_s=2.0, end_s=2.0)


def test_the_depths_change_when_blocks_come_also_while_a_batch_runs() -> None:
    rig = make_rig()
    rig.engine.submit(make_task("a", sampling=quota(4)))
    rig.engine.step()
    rig.engine.submit(make_task("b"), received_s=0.25)
    rig.engine.submit(make_task("c", prompt=4), received_s=0.5)
    events = rig.engine.take_events()
    seen = [
        (e.at_s, e.state, e.queue_depth_waiting, e.queue_depth_active, e.outstanding_prefill_tokens)
        for e in events
        if isinstance(e, WorkerState)
    ]
    assert seen == [
        (0.0, "queued", 1, 0, 12),
        (0.0, "busy", 0, 1, 12),
        (0.25, "busy", 1, 1, 24),
        (0.5, "busy", 2, 1, 32),
        (1.0, "queued", 2, 0, 20),
    ]
    assert [e.at_s for e in events if isinstance(e, BatchExecuted)] == [1.0]
    assert [e.at_s for e in events] == sorted(e.at_s for e in events)


def test_what_was_taken_before_stays_as_it_was() -> None:
    rig = make_rig()
    rig.engine.submit(make_task("a", sampling=quota(4)))
    rig.step()
    rig.engine.submit(make_task("b"), received_s=0.25)
    rig.step()
    late = [(s.at_s, s.queue_depth_waiting) for s in rig.states if s.queue_depth_waiting and s.at_s > 0]
    assert late == [(1.0, 1)]
    assert rig.drain()[make_task("b").key].times is not None


DEPTHS = Depths("busy", 0, 1, 8, 8, 2, 0)
MOMENTS = st.lists(st.tuples(st.sampled_from(["state", "arrival", "take"]), st.integers(0, 20)), max_size=20)


@settings(deadline=None)
@given(MOMENTS)
def test_at_every_time_the_depth_is_the_number_of_blocks_that_had_come(moments: list[tuple[str, int]]) -> None:
    log = EngineLog(0, 16)
    events, arrivals, now_s, num_pages = [], [], 0.0, 0
    log.state(now_s, DEPTHS)
    for what, number in moments:
        if what == "take":
            events += log.take()
        elif what == "arrival":
            arrivals.append(min(float(number), now_s))
            log.arrival(arrivals[-1], 1)
        else:
            now_s += number
            num_pages += 1
            waiting = len(arrivals)
            log.state(now_s, Depths("busy", waiting, 1, 8 + waiting, 8, num_pages, 0))
    events += log.take()
    states = [event for event in events if isinstance(event, WorkerState)]
    assert [state.at_s for state in states] == sorted(state.at_s for state in states)
    assert states[-1].queue_depth_waiting == len(arrivals)
    for state, following in pairwise(states):
        assert state.queue_depth_waiting <= following.queue_depth_waiting
        assert state.queue_depth_waiting <= sum(arrival <= state.at_s for arrival in arrivals)
    assert [state.outstanding_prefill_tokens - 8 for state in states] == [s.queue_depth_waiting for s in states]


@pytest.mark.parametrize("state", ["idle", "queued", "busy"])
def test_an_idle_worker_with_a_block_is_queued(state: str) -> None:
    wanted = {"idle": "queued", "queued": "queued", "busy": "busy"}[state]
    assert Depths(state, 0, 0, 0, 0, 0, 0).with_waiting(5).state == wanted
