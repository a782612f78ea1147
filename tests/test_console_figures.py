"""Numbers, durations, rates and the axis of the terminal views."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dbench.console.axis import axis
from dbench.console.look import ASCII, UNICODE, bar, duration, elapsed, number, rate, sparkline
from dbench.console.rates import BUCKET_S, WINDOW_S, CounterWindow, WorkerRates
from dbench.console.trials import margin_text, value_text
from dbench.progress import RuleProgress, SearchProgress, Verdict
from dbench.search.sla import parse_rule
from tests.console_snapshots import search, trial, worker


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (float("inf"), "inf"),
        (0.0012, "1.20 ms"),
        (0.812, "812 ms"),
        (0.9997, "1.00 s"),
        (1.42, "1.42 s"),
        (12.34, "12.3 s"),
        (59.96, "1:00"),
        (63.4, "1:03"),
        (3723.0, "1:02:03"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_durations_are_written_for_people(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (math.inf, "-"), (0.4, "0 s"), (34.9, "34 s"), (60.0, "1:00"), (3600.0, "1:00:00")],
)
def test_elapsed_time_is_whole_seconds(seconds: float | None, text: str) -> None:
    assert elapsed(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0312, "0.0312"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (18340.2, "18,340"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-3, 1e6))
def test_searched_rates_keep_four_digits(qps: float) -> None:
    assert float(rate(qps).replace(",", "")) == pytest.approx(qps, rel=6e-4)


@given(st.floats(0, 1), st.integers(0, 60), st.booleans())
def test_bars_have_exactly_their_width(share: float, width: int, ascii_only: bool) -> None:
    assert bar(share, width, ASCII if ascii_only else UNICODE).cell_len == width


def test_bars_are_full_or_empty_at_the_ends() -> None:
    assert bar(1.0, 4, ASCII).plain == "####"
    assert bar(0.0, 4, ASCII).plain == bar(None, 4, ASCII).plain == "...."
    assert bar(0.5, 3, UNICODE).plain == "━╸─"


def test_a_history_line_needs_its_glyphs() -> None:
    assert sparkline((0.0, 1.0, 2.0), 2, UNICODE).plain == "▄▇"
    assert sparkline((0.0, 1.0, 2.0), 2, ASCII).plain == ""


def rates_after(samples: list[tuple[float, int, int]]) -> WorkerRates:
    """Samples are (time, tokens, passes) of worker 0."""
    rates = WorkerRates()
    for now, tokens, passes in samples:
        rates.add(now, [worker(num_unmasked_tokens=tokens, num_forward_passes=passes)])
    return rates


def test_rates_are_differences_not_totals() -> None:
    got = rates_after([(0.0, 1000, 900), (2.0, 1600, 1100)]).read().of(0)
    assert got.tokens_per_s == 300
    assert got.tokens_per_pass == 3


def test_one_snapshot_gives_no_rate() -> None:
    got = rates_after([(0.0, 1000, 900)]).read()
    assert got.of(0).tokens_per_s is None
    assert got.total.tokens_per_pass is None


def test_an_idle_worker_has_speed_zero_and_no_tokens_per_pass() -> None:
    got = rates_after([(0.0, 1000, 900), (2.0, 1000, 900)]).read().of(0)
    assert got.tokens_per_s == 0
    assert got.tokens_per_pass is None


def test_the_window_forgets_what_is_old() -> None:
    got = rates_after([(t, t * 10, t) for t in range(0, 40, 2)] + [(40.0, 380, 38), (50.0, 380, 38)]).read()
    assert got.of(0).tokens_per_s == 0


@given(st.lists(st.floats(0.001, 1.0), min_size=30, max_size=200))
def test_the_window_spans_at_least_its_length_at_any_pace(gaps: list[float]) -> None:
    window, now = CounterWindow(), 0.0
    for gap in gaps:
        now += gap
        window.add(now, (0,))
    change = window.change()
    if now - gaps[0] > WINDOW_S:
        assert change is not None
        assert WINDOW_S <= change.seconds <= WINDOW_S + 1.5
    elif change is not None:
        assert change.seconds == pytest.approx(now - gaps[0])


def test_a_restarted_worker_is_measured_anew() -> None:
    got = rates_after([(0.0, 5000, 900), (2.0, 6000, 1000), (4.0, 0, 0), (6.0, 100, 50)]).read().of(0)
    assert got.tokens_per_s == 50
    assert got.tokens_per_pass == 2
    assert all(value >= 0 for value in got.history)


def test_history_holds_one_value_per_interval() -> None:
    step = BUCKET_S / 2
    got = rates_after([(n * step, n * 100, n) for n in range(9)]).read().of(0)
    assert got.history == (100 / step,) * 4


def test_totals_add_up_the_workers() -> None:
    rates = WorkerRates()
    for now, tokens in ((0.0, 0), (1.0, 100)):
        rates.add(now, [worker(worker_id=i, num_unmasked_tokens=tokens, num_forward_passes=tokens) for i in (0, 1)])
    assert rates.read().total.tokens_per_s == 200


def judged(text: str, value: float | None) -> RuleProgress:
    rule = parse_rule(text)
    margin = None if value is None else rule.margin(value)
    return RuleProgress(rule.text, value, rule.threshold, rule.unit, None, margin)


@pytest.mark.parametrize(
    ("rule", "margin", "value"),
    [
        (judged("request_e2e_time:p90<=8s", 7.0), "+12.5%", "7.00/8 s"),
        (judged("request_e2e_time:p90<=900ms", 1.8), "-100%", "1,800/900 ms"),
        (judged("goodput>=2", 3.0), "+50.0%", "3.00/2"),
        (judged("error_rate<=0.01", 0.0), "+100%", "0/0.01"),
        (judged("request_num_blocks:mean==4", 5.0), "-25.0%", "5.00/4"),
        (judged("request_e2e_time:p90<=8s", math.inf), "<-999%", "inf/8 s"),
        (judged("request_e2e_time:p90<=8s", None), "-", "-/8 s"),
        (judged("error_rate<=0", 0.1), "-10.0%", "0.100/0"),
    ],
)
def test_rules_are_shown_with_their_margin(rule: RuleProgress, margin: str, value: str) -> None:
    assert margin_text(rule) == margin
    assert value_text(rule) == value


def marks(progress: SearchProgress, width: int = 60) -> str:
    return axis(progress, width, ASCII)[0].plain


def test_the_axis_shows_trials_in_order_with_the_bracket_between() -> None:
    line = marks(search())
    assert [c for c in line if c in "ox*"] == ["o", "o", "*", "x"]
    inside = line[line.rindex("o") + 1 : line.index("x")].replace("*", "")
    assert inside
    assert set(inside) == {"="}


def test_equal_factors_of_qps_are_equal_steps_on_the_axis() -> None:
    line = marks(search(trials=tuple(trial(n, 2.0**n) for n in range(4)), running=None, lowest_fail=None))
    where = [n for n, c in enumerate(line) if c == "o"]
    steps = [b - a for a, b in pairwise(where)]
    assert max(steps) - min(steps) <= 1


def test_the_axis_closes_in_on_a_small_bracket() -> None:
    far = (trial(1, 0.1), trial(2, 2.0), trial(3, 2.1, Verdict.FAIL), trial(4, 50.0, Verdict.FAIL))
    line = marks(search(trials=far, highest_pass=2.0, lowest_fail=2.1, running=None))
    assert line.startswith("<1 ")
    assert line.endswith(" 1>")
    assert line.count("=") > 10


def test_an_axis_needs_a_rate() -> None:
    empty = search(trials=(), highest_pass=None, lowest_fail=None, running=None)
    assert [line.plain for line in axis(empty, 60, UNICODE)] == ["", ""]


@example(rates=[1.0], width=16, bracket=(1334.1875, 1.0001))  # no multiple of 0.5 lies in the range that is shown
@given(
    rates=st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=12),
    width=st.integers(16, 200),
    bracket=st.tuples(st.floats(1e-3, 1e4), st.floats(1.0001, 10)),
)
def test_the_axis_is_as_wide_as_told(rates: list[float], width: int, bracket: tuple[float, float]) -> None:
    trials = tuple(trial(n, qps) for n, qps in enumerate(rates))
    low, factor = bracket
    upper, lower = axis(search(trials=trials, highest_pass=low, lowest_fail=low * factor), width, UNICODE)
    assert upper.cell_len == width
    assert lower.cell_len <= width
    assert lower.plain.strip()
