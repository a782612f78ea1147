"""What every entry of QUEUE_ORDERS promises."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.options import EngineOptions, options_of
from dbench.serve.policy import QUEUE_ORDERS
from dbench.serve.sequence import BlockKey, BlockOutcome, BlockTask
from tests.serve.engine_builders import make_rig, make_task

TASKS = st.lists(
    st.builds(
        lambda name, index, arrival, remaining: make_task(
            name, block_index=index, arrival_s=arrival, num_remaining_blocks=remaining
        ),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 3),
        st.sampled_from([0.0, 1.0, 2.0]),
        st.integers(1, 3),
    ),
    max_size=12,
    unique_by=lambda task: task.key,
)


def names(tasks: list[BlockTask]) -> list[BlockKey]:
    return [task.key for task in tasks]


@pytest.mark.parametrize("name", QUEUE_ORDERS)
@given(tasks=TASKS, seed=st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_the_order_of_submission(name: str, tasks: list[BlockTask], seed: Random) -> None:
    shuffled = list(tasks)
    seed.shuffle(shuffled)
    assert names(sorted(tasks, key=QUEUE_ORDERS[name])) == names(sorted(shuffled, key=QUEUE_ORDERS[name]))


@pytest.mark.parametrize("name", QUEUE_ORDERS)
@given(tasks=TASKS)
def test_no_two_blocks_are_equal(name: str, tasks: list[BlockTask]) -> None:
    assert len({QUEUE_ORDERS[name](task) for task in tasks}) == len(tasks)


@pytest.mark.parametrize("name", QUEUE_ORDERS)
def test_of_two_like_blocks_the_request_that_came_first_goes_first(name: str) -> None:
    early, late = make_task("z", arrival_s=1.0), make_task("a", arrival_s=2.0)
    assert QUEUE_ORDERS[name](early) < QUEUE_ORDERS[name](late)


@pytest.mark.parametrize("name", QUEUE_ORDERS)
def test_an_engine_runs_every_block_of_a_queue_in_this_order(name: str) -> None:
    rig = make_rig(queue_policy=name, max_batch_size=1)
    tasks = [make_task(n, arrival_s=i % 3, num_remaining_blocks=1 + i % 2) for i, n in enumerate("abcdefg")]
    ends = rig.run(tasks)
    assert {end.outcome for end in ends} == {BlockOutcome.DONE}
    assert names(rig.runner.attached) == names(sorted(tasks, key=QUEUE_ORDERS[name]))


def test_the_option_offers_exactly_these_orders() -> None:
    spec = next(option.spec for option in options_of(EngineOptions) if option.name == "prefill_queue_policy")
    assert set(spec.choices) == set(QUEUE_ORDERS)
