"""What every route promises, whichever table it is in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.options import EngineOptions, options_of
from dbench.serve.routes import DECODE_ROUTES, HYBRID_PREFILL_ROUTES, PREFILL_ROUTES, RouteState, WorkerLoad

ROUTES = {**PREFILL_ROUTES, **{f"{name} (decode)": route for name, route in DECODE_ROUTES.items()}}

LOADS = st.lists(
    st.builds(
        WorkerLoad,
        st.integers(0, 9),
        st.sampled_from([0, 100, 200]),
        st.integers(0, 3),
        st.integers(0, 300),
        st.integers(0, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda load: load.worker_id,
)


@pytest.mark.parametrize("name", ROUTES)
@given(loads=LOADS, canvas=st.integers(1, 4000), seed=st.integers(0, 99))
def test_a_route_leads_to_one_of_the_workers(name: str, loads: list[WorkerLoad], canvas: int, seed: int) -> None:
    assert ROUTES[name](loads, canvas, RouteState(random.Random(seed))) in {load.worker_id for load in loads}


@pytest.mark.parametrize("name", ROUTES)
@given(rounds=st.lists(LOADS, max_size=8), seed=st.integers(0, 99))
def test_equal_seeds_give_equal_routes_whatever_the_order_of_the_loads(
    name: str, rounds: list[list[WorkerLoad]], seed: int
) -> None:
    first, second = RouteState(random.Random(seed)), RouteState(random.Random(seed))
    for loads in rounds:
        assert ROUTES[name](loads, 10, first) == ROUTES[name](list(reversed(loads)), 10, second)


@pytest.mark.parametrize("name", ROUTES)
def test_equal_workers_are_all_used(name: str) -> None:
    state = RouteState(random.Random(0))
    loads = [WorkerLoad(worker_id, 0, 0, 0) for worker_id in range(4)]
    assert {ROUTES[name](loads, 10, state) for _ in range(100)} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ROUTES)
def test_work_that_is_charged_spreads_over_all_workers(name: str) -> None:
    state = RouteState(random.Random(0))
    tokens = [0, 0, 0]
    for _ in range(30):
        loads = [WorkerLoad(i, total, total // 10, total, 1000 - total) for i, total in enumerate(tokens)]
        tokens[ROUTES[name](loads, 10, state)] += 10
    assert max(tokens) - min(tokens) <= (20 if "clustering" in name else 0)


@pytest.mark.parametrize("name", ROUTES)
def test_routing_without_a_worker_is_an_invariant_failure(name: str) -> None:
    with pytest.raises(AssertionError, match="no worker"):
        ROUTES[name]([], 10, RouteState(random.Random(0)))


def test_the_options_offer_exactly_these_routes() -> None:
    choices = {option.name: set(option.spec.choices) for option in options_of(EngineOptions)}
    assert choices["prefill_scheduler_policy"] == set(PREFILL_ROUTES)
    assert choices["decode_scheduler_policy"] == set(DECODE_ROUTES)


def test_hybrid_mode_has_a_part_of_the_prefill_routes() -> None:
    assert HYBRID_PREFILL_ROUTES.items() < PREFILL_ROUTES.items()
