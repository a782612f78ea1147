"""Growth within a trial, and verdicts that are certain before its end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.quantiles import quantile
from dbench.search.sla import parse_rule
from dbench.search.statistics import Growth, growth, is_lost, max_beyond


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.07]))
def test_a_quantile_keeps_its_limit_while_no_more_values_lie_beyond_it(values: list[int], q: float) -> None:
    for limit in range(6):
        beyond = sum(v > limit for v in values)
        assert (quantile(values, q) <= limit) is (beyond <= max_beyond(q, len(values)))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=200), st.integers(0, 200), st.sampled_from(["<=", "<"]))
def test_a_rule_lost_early_is_lost_in_the_end(values: list[float], num_seen: int, op: str) -> None:
    rule = parse_rule(f"request_e2e_time:p90{op}1s")
    if is_lost(rule, len(values), values[:num_seen]):
        assert not rule.holds(quantile(values, 0.9))
    assert is_lost(rule, len(values), values) is not rule.holds(quantile(values, 0.9))


def test_a_rule_is_lost_when_too_many_are_still_waiting() -> None:
    rule = parse_rule("request_e2e_time:p90<=1s")
    ages = [1.5] * 11
    assert is_lost(rule, 100, ages)
    assert not is_lost(rule, 100, ages[1:])


@pytest.mark.parametrize("text", ["request_e2e_time:mean<=1s", "request_num_gen_tokens:p10>=4"])
def test_only_upper_limits_on_quantiles_are_lost_early(text: str) -> None:
    assert not is_lost(parse_rule(text), 10, [math.inf] * 10)


def test_latencies_that_climb_past_a_quarter_of_the_limit_grow() -> None:
    times = np.arange(400.0)
    found = growth(times, 1.0 + times / 400)
    assert found is not None
    assert found.rise == pytest.approx(399 / 400)
    assert found.breaks(threshold=3.9)
    assert not found.breaks(threshold=4.1)


def test_a_line_through_noise_is_recovered() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 1000)
    times = np.linspace(0, 100, 1000)
    found = growth(times, 1 + 0.02 * times + noise)
    assert found is not None
    assert found.rise == pytest.approx(2, rel=0.05)
    assert found.t > 20


def test_noise_alone_seldom_grows() -> None:
    generator = np.random.default_rng(1)
    times = np.arange(400.0)
    found = [growth(times, generator.exponential(1.0, 400)) for _ in range(200)]
    assert sum(f is not None and f.t > 1.73 for f in found) < 30  # about 5%, a few more for correlated blocks
    assert not any(f is not None and f.breaks(threshold=4.0) for f in found)


def test_a_slow_wave_is_no_growth() -> None:
    times = np.arange(400.0)
    found = growth(times, 2 + np.sin(2 * np.pi * times / 400))
    assert found is not None
    assert not found.breaks(threshold=1.0)


def trend_of_blocks(means: list[float]) -> Growth:
    """Of two equal values per block, one second apart: blocks are two seconds apart, and sum (x - mean x)^2 = 330."""
    found = growth(np.arange(20.0), np.repeat(means, 2))
    assert found is not None
    return found


def test_the_error_of_a_hand_worked_zigzag() -> None:
    # sum (x - mean x) y = 5, so the slope is 5/330. The squared residuals sum up to 2.5 - 25/330 = 80/33, the error of
    # the slope is sqrt(80/33 / 8 / 330) = 1/33. Neighbours differ in sign: r < 0 counts as 0.
    found = trend_of_blocks([0, 1] * 5)
    assert found.t == pytest.approx((5 / 330) / (1 / 33))
    assert found.rise == pytest.approx(19 * 5 / 330)


def test_the_error_of_a_hand_worked_step_is_widened_by_its_correlation() -> None:
    # slope 25/330; residuals 6 1 -4 -9 -14 14 9 4 -1 -6, each / 33: squares 660, neighbours' products 132, so r = 0.2.
    # Error of the slope: sqrt(660/1089 / 8 / 330) = 1/66, times sqrt(1.2 / 0.8).
    found = trend_of_blocks([0.0] * 5 + [1.0] * 5)
    assert found.t == pytest.approx((25 / 330) / (1 / 66) / math.sqrt(1.5))
    assert found.rise == pytest.approx(19 * 25 / 330)
    assert found.breaks(threshold=5.7)
    assert not found.breaks(threshold=5.8)


@given(st.integers(0, 300), st.floats(0, 10))
def test_two_values_per_block_have_a_trend(count: int, value: float) -> None:
    found = growth(np.arange(count), np.full(count, value))
    assert (found is None) is (count < 20)
    assert found is None or not found.breaks(threshold=1.0)


def test_failed_requests_are_left_out() -> None:
    times = np.arange(100.0)
    values = 1 + times
    with_failures = values.copy()
    with_failures[::7] = math.inf
    plain, found = growth(times, values), growth(times, with_failures)
    assert plain is not None
    assert found is not None
    assert found.rise == pytest.approx(plain.rise, rel=0.02)


def test_requests_sent_all_at_once_have_no_trend() -> None:
    assert growth(np.zeros(50), np.arange(50.0)) is None
