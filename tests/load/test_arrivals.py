"""Gaps have mean 1 and know nothing of the rate."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import OptionError
from dbench.load.arrivals import ARRIVALS, arrival_times

PROCESSES = sorted(ARRIVALS)


def times(process: str, qps: float, count: int, *, seed: int = 7, cv: float = 0.5) -> list[float]:
    return list(islice(arrival_times(process, qps, cv, np.random.default_rng(seed)), count))


@pytest.mark.parametrize("process", PROCESSES)
@given(seed=st.integers(0, 2**32), qps=st.floats(0.001, 1000))
def test_another_rate_gives_the_same_draws_scaled_in_time(process: str, seed: int, qps: float) -> None:
    at_one = times(process, 1.0, 300, seed=seed)
    assert times(process, qps, 300, seed=seed) == pytest.approx([t / qps for t in at_one])


@pytest.mark.parametrize("process", PROCESSES)
@given(seed=st.integers(0, 2**32), fewer=st.integers(1, 600))
def test_more_requests_continue_the_same_draws(process: str, seed: int, fewer: int) -> None:
    assert times(process, 3.0, 600, seed=seed)[:fewer] == times(process, 3.0, fewer, seed=seed)


@pytest.mark.parametrize("process", PROCESSES)
def test_the_first_request_comes_at_zero_and_time_never_runs_backwards(process: str) -> None:
    drawn = times(process, 2.0, 2000)
    assert drawn[0] == 0.0
    assert all(a <= b for a, b in pairwise(drawn))


@pytest.mark.parametrize("process", PROCESSES)
def test_gaps_have_mean_one(process: str) -> None:
    gaps = np.diff(times(process, 1.0, 50_000))
    assert gaps.mean() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("process", "cv", "wanted"), [("poisson", 0.3, 1.0), ("gamma", 0.3, 0.3), ("gamma", 3.0, 3.0)])
def test_gaps_vary_as_asked(process: str, cv: float, wanted: float) -> None:
    gaps = np.diff(times(process, 1.0, 100_000, cv=cv))
    assert gaps.std() / gaps.mean() == pytest.approx(wanted, rel=0.05)


def test_static_gaps_are_all_alike() -> None:
    assert times("static", 4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_random_gaps_are_not_rescaled_to_the_nominal_rate() -> None:
    spans = {times("poisson", 1.0, 100, seed=seed)[-1] for seed in range(5)}
    assert len(spans) == 5
    assert 99.0 not in spans


@pytest.mark.parametrize("process", PROCESSES)
def test_an_infinite_rate_is_all_at_once(process: str) -> None:
    assert times(process, math.inf, 300) == [0.0] * 300


def test_an_unknown_process_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"unknown interval_type 'poison'.*did you mean 'poisson'.*gamma.*static"):
        arrival_times("poison", 1.0, 0.5, np.random.default_rng(0))
