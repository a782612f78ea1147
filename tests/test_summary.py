"""What a run amounts to."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest

from dbench.measure.intervals import Absence
from dbench.measure.summary import lag_limit, summarize
from tests.event_builders import (
    block,
    done,
    drawn,
    ended,
    run_of,
    sent,
    simple_requests,
    started,
    worker_lost,
    worker_up,
)


def test_the_figures_of_a_run_of_four_and_a_failure() -> None:
    summary = summarize(
        run_of(drawn(num_rounded=3, num_shortened=1, num_repeated=2), *simple_requests([2.0, 1.0, None, 3.0, 6.0]))
    )
    assert (summary.num_requests, summary.num_successful, summary.num_failed) == (5, 4, 1)
    assert summary.latency is not None
    assert astuple(summary.latency) == pytest.approx((1.0, 3.0, 2.0, 6.0, 6.0, 6.0))
    assert summary.wall_clock_time == pytest.approx(10.0)
    assert (summary.total_gen_tokens, summary.total_forward_passes) == (16, 8)
    assert summary.tokens_per_sec == pytest.approx(1.6)
    assert summary.requests_per_sec == summary.achieved_qps == pytest.approx(0.4)
    assert summary.tokens_per_forward_pass == 2.0
    assert summary.offered_qps == 2.0
    assert summary.sent_qps == pytest.approx(1.0)
    assert (summary.complete, summary.reason, summary.valid) == (True, "complete", True)
    assert (summary.num_rounded, summary.num_shortened, summary.num_repeated, summary.seed) == (3, 1, 2, 42)
    assert (summary.rule, summary.ignore_eos) == ("conf_threshold 0.9, temperature 0", True)


def test_a_killed_run_keeps_what_it_measured() -> None:
    summary = summarize(run_of(started(10), sent("a"), sent("b", 1, intended=1.0), done("a", 2.0)))
    assert (summary.complete, summary.reason) == (False, "killed")
    assert (summary.num_requests, summary.num_sent) == (10, 2)
    assert (summary.num_successful, summary.num_failed, summary.num_unfinished) == (1, 0, 1)
    assert summary.unaccounted_share_p50 is None


def test_a_run_that_was_stopped_says_why() -> None:
    summary = summarize(run_of(*simple_requests([1.0])[:-1], ended(reason="timeout", detail="2 requests unfinished")))
    assert (summary.complete, summary.reason, summary.detail) == (False, "timeout", "2 requests unfinished")


def test_a_run_without_any_request_has_no_figures() -> None:
    summary = summarize(run_of(started(5), ended(reason="interrupted")))
    figures = (summary.latency, summary.lag, summary.wall_clock_time, summary.tokens_per_sec)
    assert all(figure is None for figure in figures)
    assert summary.num_successful == summary.total_gen_tokens == 0


@pytest.mark.parametrize(("lag", "latency", "is_valid"), [(0.019, 0.5, True), (0.021, 0.5, False), (0.021, 2.0, True)])
def test_a_run_whose_generator_lags_is_invalid_rather_than_slow(lag: float, latency: float, is_valid: bool) -> None:
    summary = summarize(run_of(started(1), sent("a", lag=lag), done("a", latency), ended()))
    assert summary.valid is is_valid
    assert (summary.invalid_reason == "") is is_valid


def test_the_reason_of_an_invalid_run_has_both_numbers() -> None:
    summary = summarize(run_of(started(1), sent("a", lag=0.5), done("a", 2.0), ended()))
    assert "p99 send lag 500.0 ms, limit 40.0 ms" in summary.invalid_reason


def test_the_limit_on_lag_is_20_ms_or_2_percent_of_the_median() -> None:
    assert [lag_limit(median) for median in (None, 0.1, 1.0, 5.0)] == [0.02, 0.02, 0.02, pytest.approx(0.1)]


def test_used_workers_are_those_that_decoded() -> None:
    steps = ((0.2, 4),)
    summary = summarize(
        run_of(
            started(1),
            sent("a"),
            done("a", 1.0),
            worker_up(worker_id=0),
            worker_up(worker_id=1),
            block("a", 0, worker_id=1, scheduler=(0.0, 0.0, 0.9), worker=(0, 0.1, 0.2, 0.2, 0.9), steps=steps),
        )
    )
    assert (summary.workers, summary.workers_used) == ((0, 1), (1,))
    assert summary.unaccounted_share_p50 == pytest.approx(0.1)


@pytest.mark.parametrize("qps", [0.0, math.inf])
def test_closed_loop_and_all_at_once_keep_their_marks(qps: float) -> None:
    assert summarize(run_of(started(1, qps), sent("a"), done("a"))).offered_qps == qps


def test_workers_that_were_lost_are_told_with_the_times_of_their_absence() -> None:
    away = [worker_lost(2.0), worker_lost(3.0, 1), worker_up(4.5, 1)]
    summary = summarize(run_of(worker_up(), worker_up(worker_id=1), *simple_requests([1.0] * 5), *away))
    assert summary.workers_lost == (
        Absence(0, "its stream ended", 2.0, None),
        Absence(1, "its stream ended", 3.0, 4.5),
    )


def test_an_absence_that_was_over_before_the_run_is_none_of_its_business() -> None:
    before = [worker_up(-9.0), worker_lost(-3.0), worker_up(-1.0)]
    reaching_into_it = [worker_up(-9.0, 1), worker_lost(-3.0, 1), worker_up(0.5, 1)]
    summary = summarize(run_of(*before, *reaching_into_it, *simple_requests([1.0])))
    assert [(absence.worker_id, absence.end_time) for absence in summary.workers_lost] == [(1, 0.5)]
