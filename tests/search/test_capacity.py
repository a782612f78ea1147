"""The sequence of a capacity search, and what its verdicts say."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dbench.errors import OptionError
from dbench.progress import Verdict
from dbench.search.capacity import (
    MAX_INVALID_TRIALS,
    Bracket,
    SearchSettings,
    Stop,
    StopReason,
    Tried,
    Try,
    Wait,
    bracket_of,
    capacity_of,
    next_step,
)
from dbench.search.space import is_within, midpoint, parse_qps_list, qps_name

Judge = Callable[[float], Verdict]


def capacity(limit: float) -> Judge:
    return lambda qps: Verdict.PASS if qps <= limit else Verdict.FAIL


def passed(*rates: float) -> list[Tried]:
    return [Tried(q, Verdict.PASS) for q in rates]


def failed(*rates: float) -> list[Tried]:
    return [Tried(q, Verdict.FAIL) for q in rates]


def search(judge: Judge, settings: SearchSettings, trials: list[Tried] | None = None) -> tuple[list[Tried], StopReason]:
    trials = list(trials or [])
    while isinstance(step := next_step(trials, settings), Try):
        trials.append(Tried(step.qps, judge(step.qps)))
    assert isinstance(step, Stop)
    return trials, step.reason


def test_it_doubles_until_a_fail_and_then_halves_the_bracket() -> None:
    trials, reason = search(capacity(3.5), SearchSettings(start_qps=1, granularity_pct=10))
    assert [t.qps for t in trials] == [1, 2, 4, 2.82843, 3.36359, 3.66802]
    assert reason is StopReason.BRACKET_CLOSED
    assert bracket_of(trials) == Bracket(3.36359, 3.66802, False)


def test_it_halves_until_a_pass_when_the_start_is_too_high() -> None:
    trials, _ = search(capacity(0.3), SearchSettings(start_qps=1, granularity_pct=30))
    assert [t.qps for t in trials] == [1, 0.5, 0.25, 0.353553, 0.297302]


def test_the_cap_itself_is_tried_and_not_overshot() -> None:
    settings = SearchSettings(start_qps=1, max_qps_cap=5)
    trials, reason = search(capacity(100), settings)
    assert [t.qps for t in trials] == [1, 2, 4, 5]
    assert reason is StopReason.CAP_REACHED
    assert capacity_of(trials, settings, reason) == 5


def test_a_fail_at_the_cap_is_an_ordinary_fail() -> None:
    settings = SearchSettings(start_qps=1, max_qps_cap=5, granularity_pct=15)
    trials, reason = search(capacity(4.2), settings)
    assert [t.qps for t in trials] == [1, 2, 4, 5, 4.47214]
    assert (reason, capacity_of(trials, settings, reason)) == (StopReason.BRACKET_CLOSED, 4)


def test_a_start_above_the_cap_begins_at_the_cap() -> None:
    assert next_step([], SearchSettings(start_qps=9, max_qps_cap=5)) == Try(5)


def test_stored_trials_above_the_cap_decide_nothing() -> None:
    settings = SearchSettings(start_qps=1, max_qps_cap=3)
    assert next_step(passed(2, 4), settings) == Try(3)
    assert next_step([*passed(2), *failed(4)], settings) == Try(3)


def test_it_stops_going_down_where_no_lower_rate_can_help() -> None:
    settings = SearchSettings(start_qps=1)
    trials = [*failed(1, 0.5), Tried(0.25, Verdict.FAIL, hopeless=True)]
    assert next_step(failed(1, 0.5), settings) == Try(0.25)
    assert next_step(trials, settings) == Stop(StopReason.NO_PASS_IN_RANGE)
    assert capacity_of(trials, settings, StopReason.NO_PASS_IN_RANGE) is None


def test_nothing_passed_within_the_iterations() -> None:
    trials, reason = search(capacity(0), SearchSettings(start_qps=1, max_iterations=4))
    assert [t.qps for t in trials] == [1, 0.5, 0.25, 0.125]
    assert reason is StopReason.NO_PASS_IN_RANGE


def test_the_iterations_end_an_open_bracket_with_the_highest_pass() -> None:
    settings = SearchSettings(start_qps=1, max_iterations=4)
    trials, reason = search(capacity(3.5), settings)
    assert (reason, capacity_of(trials, settings, reason)) == (StopReason.MAX_ITERATIONS, 2.82843)


def test_a_pass_above_a_fail_only_sets_the_flag() -> None:
    trials = [*passed(1, 4, 8), *failed(2)]
    assert bracket_of(trials) == Bracket(1, 2, True)
    assert next_step(trials, SearchSettings(start_qps=1)) == Try(1.41421)


def test_a_fail_below_every_pass_leaves_no_capacity() -> None:
    trials = [*passed(4), *failed(1)]
    settings = SearchSettings(start_qps=1, max_iterations=2)
    assert bracket_of(trials) == Bracket(None, 1, True)
    assert next_step(trials, settings) == Stop(StopReason.NO_PASS_IN_RANGE)


def test_an_invalid_trial_is_repeated_twice_and_then_ends_the_search() -> None:
    settings = SearchSettings(start_qps=1)
    trials = passed(1)
    for _ in range(MAX_INVALID_TRIALS):
        assert next_step(trials, settings) == Try(2)
        trials.append(Tried(2, Verdict.INVALID))
    assert next_step(trials, settings) == Stop(StopReason.INVALID_TRIALS)
    assert capacity_of(trials, settings, StopReason.INVALID_TRIALS) is None


def test_invalid_trials_use_up_no_iteration() -> None:
    trials = [Tried(1, Verdict.INVALID), *passed(1)]
    assert next_step(trials, SearchSettings(start_qps=1, max_iterations=2)) == Try(2)


def test_a_search_waits_for_the_trial_of_another_process() -> None:
    settings = SearchSettings(start_qps=1)
    assert next_step(passed(1), settings, running=[2]) == Wait()
    assert next_step([], settings, running=[1]) == Wait()


def test_a_list_runs_every_rate_in_its_order() -> None:
    settings = SearchSettings(start_qps=None, qps_list=(2, 8, 1), max_iterations=1)
    trials, reason = search(capacity(4), settings)
    assert [t.qps for t in trials] == [2, 8, 1]
    assert (reason, capacity_of(trials, settings, reason)) == (StopReason.LIST_DONE, 2)


def test_processes_that_share_a_list_take_different_rates() -> None:
    settings = SearchSettings(start_qps=None, qps_list=(2, 8, 1))
    assert next_step([], settings, running=[2]) == Try(8)
    assert next_step(passed(8), settings, running=[2, 1]) == Wait()


def test_a_list_of_fails_has_no_pass_in_range() -> None:
    settings = SearchSettings(start_qps=None, qps_list=(2, 8))
    assert next_step(failed(2, 8), settings) == Stop(StopReason.NO_PASS_IN_RANGE)


def test_a_list_without_an_sla_ends_without_verdicts() -> None:
    settings = SearchSettings(start_qps=None, qps_list=(2,))
    trials = [Tried(2, Verdict.UNJUDGED)]
    assert next_step(trials, settings) == Stop(StopReason.LIST_DONE)
    assert capacity_of(trials, settings, StopReason.LIST_DONE) is None


capacities = st.floats(math.log(0.001), math.log(1000)).map(math.exp)
starts = st.floats(math.log(0.001), math.log(1000)).map(math.exp)
granularities = st.floats(0.1, 50)


@given(capacities, starts, granularities)
def test_the_bracket_holds_the_true_capacity_within_the_granularity(true: float, start: float, pct: float) -> None:
    settings = SearchSettings(start_qps=start, granularity_pct=pct, max_iterations=1000)
    trials, reason = search(capacity(true), settings)
    bracket = bracket_of(trials)
    assert reason is StopReason.BRACKET_CLOSED
    assert bracket.highest_pass is not None
    assert bracket.lowest_fail is not None
    assert bracket.highest_pass <= true < bracket.lowest_fail
    assert is_within(bracket.highest_pass, bracket.lowest_fail, pct)
    assert capacity_of(trials, settings, reason) == bracket.highest_pass


@given(capacities, starts, granularities)
def test_the_number_of_trials_is_bounded(true: float, start: float, pct: float) -> None:
    trials, _ = search(capacity(true), SearchSettings(start_qps=start, granularity_pct=pct, max_iterations=1000))
    bracketing = 2 + math.ceil(abs(math.log2(true / start)))
    bisecting = max(0, math.ceil(math.log2(math.log(2) / math.log(1 + pct / 100))))
    assert len(trials) <= bracketing + bisecting + 1
    assert len({t.qps for t in trials}) == len(trials)


@given(capacities, starts, st.integers(0, 30), st.randoms(use_true_random=False))
def test_a_search_goes_on_in_the_same_way_from_any_part_of_it(
    true: float, start: float, kept: int, random: Random
) -> None:
    settings = SearchSettings(start_qps=start, max_iterations=1000)
    whole, reason = search(capacity(true), settings)
    prefix = whole[:kept]
    random.shuffle(prefix)
    resumed, resumed_reason = search(capacity(true), settings, prefix)
    assert [t.qps for t in resumed[len(prefix) :]] == [t.qps for t in whole[len(prefix) :]]
    assert resumed_reason is reason


@given(st.lists(st.tuples(capacities, st.sampled_from(Verdict)), max_size=20), starts)
def test_any_verdicts_lead_to_an_end(seen: list[tuple[float, Verdict]], start: float) -> None:
    assume(all(v is not Verdict.RUNNING for _, v in seen))
    trials = [Tried(q, v) for q, v in seen]
    settings = SearchSettings(start_qps=start, max_iterations=30)
    resumed, reason = search(lambda q: Verdict.PASS if int(q * 1e6) % 2 else Verdict.FAIL, settings, trials)
    assert len(resumed) <= len(trials) + 30
    found = capacity_of(resumed, settings, reason)
    assert found is None or all(t.qps > found for t in resumed if t.verdict is Verdict.FAIL)


@pytest.mark.parametrize(("low", "high"), [(1, 2), (0.001, 0.0011), (999, 1000), (1e-6, 1e6)])
def test_the_midpoint_lies_between(low: float, high: float) -> None:
    assert low < midpoint(low, high) < high


def test_tolerances_are_relative() -> None:
    assert is_within(0.001, 0.00102, 2.5)
    assert not is_within(0.001, 0.00103, 2.5)


@pytest.mark.parametrize(("qps", "name"), [(0.25, "0.25"), (12.0, "12"), (1.41421, "1.41421"), (0.00123, "0.00123")])
def test_a_rate_as_a_folder_name(qps: float, name: str) -> None:
    assert qps_name(qps) == name


def test_a_list_of_rates_is_read() -> None:
    assert parse_qps_list("1, 2.5,4", "--qps-list") == (1.0, 2.5, 4.0)


@pytest.mark.parametrize("text", ["", "1,,2", "1,x", "0", "-1", "inf", "nan", "1,2,1"])
def test_a_wrong_list_of_rates_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--qps-list"):
        parse_qps_list(text, "--qps-list")
