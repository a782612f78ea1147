"""The one definition of a percentile."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.quantiles import (
    cumulative_distribution,
    quantile,
    quantiles,
    time_weighted_mean,
    time_weighted_quantile,
)

VALUES = st.lists(st.floats(0, 1e6) | st.just(math.inf), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.0, 1.0), (0.1, 1.0), (0.11, 2.0), (0.5, 5.0), (0.51, 6.0), (0.9, 9.0), (0.99, 10.0), (1.0, 10.0)],
)
def test_the_quantile_is_the_smallest_value_that_reaches_its_rank(q: float, expected: float) -> None:
    assert quantile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], q) == expected


def test_a_rank_that_is_whole_but_for_rounding_is_that_rank() -> None:
    assert 0.07 * 100 > 7
    assert quantile(np.arange(1, 101), 0.07) == 7


def test_failures_are_the_largest_values() -> None:
    assert quantile([1.0, math.inf, 2.0, 3.0], 0.75) == 3.0
    assert quantile([1.0, math.inf, 2.0, 3.0], 0.76) == math.inf


@settings(deadline=None)
@given(VALUES, st.integers(1, 99))
def test_the_quantile_is_the_sorted_value_at_its_rank(values: list[float], percent: int) -> None:
    rank = -(-percent * len(values) // 100)
    assert quantile(values, percent / 100) == sorted(values)[rank - 1]


@settings(deadline=None)
@given(VALUES)
def test_several_quantiles_are_each_as_if_asked_alone(values: list[float]) -> None:
    qs = (0.99, 0.5, 0.9)
    assert quantiles(values, qs) == [quantile(values, q) for q in qs]


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_no_values_and_unknown_values_have_no_quantile(values: list[float]) -> None:
    with pytest.raises(ValueError, match="a quantile of"):
        quantile(values, 0.5)


def test_a_quantile_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, got 90"):
        quantile([1.0], 90)


@pytest.mark.parametrize(("q", "expected"), [(0.1, 0.0), (0.6, 0.0), (0.61, 2.0), (0.9, 2.0), (0.91, 5.0), (1.0, 5.0)])
def test_over_time_a_value_counts_by_how_long_it_held(q: float, expected: float) -> None:
    assert time_weighted_quantile([5.0, 0.0, 2.0, 0.0], [1.0, 4.0, 3.0, 2.0], q) == expected


def test_a_value_that_held_for_no_time_does_not_count() -> None:
    assert time_weighted_quantile([9.0, 1.0], [0.0, 2.0], 1.0) == 1.0
    assert time_weighted_quantile([0.0, 1.0], [0.0, 2.0], 0.0) == 1.0


def test_the_mean_over_time_weighs_by_duration() -> None:
    assert time_weighted_mean([4.0, 0.0], [1.0, 3.0]) == 1.0


def test_no_time_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="over no time"):
        time_weighted_quantile([1.0], [0.0], 0.5)


@settings(deadline=None)
@given(VALUES.filter(lambda values: len(values) <= 100), st.integers(1, 99))
def test_the_distribution_passes_through_every_quantile(values: list[float], percent: int) -> None:
    shares, steps = cumulative_distribution(values, 1001)
    reached = steps[shares >= percent / 100 - 1e-9]
    assert (reached[0] if reached.size else math.inf) == quantile(values, percent / 100)


def test_a_distribution_of_many_values_keeps_to_its_points_and_its_ends() -> None:
    shares, steps = cumulative_distribution(np.arange(1, 50_001), 1001)
    assert len(shares) == 1001
    assert (shares[0], steps[0], shares[-1], steps[-1]) == (1 / 50_000, 1, 1.0, 50_000)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99, 0.999])
def test_a_thinned_distribution_still_passes_through_its_quantiles(q: float) -> None:
    values = np.random.default_rng(7).lognormal(size=12_345)
    shares, steps = cumulative_distribution(values, 1001)
    assert steps[shares >= q - 1e-9][0] == quantile(values, q)


def test_a_distribution_ends_below_1_where_requests_failed() -> None:
    shares, steps = cumulative_distribution([1.0, 2.0, 3.0, math.inf], 1001)
    assert shares.tolist() == [0.25, 0.5, 0.75]
    assert steps.tolist() == [1.0, 2.0, 3.0]


def test_a_distribution_of_failures_alone_is_empty() -> None:
    shares, steps = cumulative_distribution([math.inf], 1001)
    assert shares.size == steps.size == 0
