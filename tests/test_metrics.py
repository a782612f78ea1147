"""Request and block metrics, against runs small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.errors import RunError, SlaError
from dbench.events import Event
from dbench.metrics import (
    REQUEST_METRICS,
    block_table,
    error_rate,
    goodput,
    judged_mean,
    judged_quantile,
    judged_requests,
    judged_window,
    metric_values,
    request_table,
    summarize,
)
from tests.event_builders import (
    arrived,
    block,
    done,
    drawn,
    ended,
    failed_block,
    pending,
    run_of,
    sent,
    simple_requests,
    started,
    state,
    worker_up,
)

ONE_REQUEST = (
    drawn(),
    started(1),
    sent("a", lag=0.01, gen_length=8),
    done("a", 0.85, num_gen_tokens=8, num_forward_passes=5, first_block=0.53),
    arrived("a", 0.02),
    block(
        "a",
        0,
        scheduler=(0.02, 0.05, 0.50),
        worker=(0.06, 0.10, 0.20, 0.25, 0.45),
        steps=((0.20, 1), (0.35, 2), (0.45, 1)),
    ),
    block(
        "a",
        1,
        scheduler=(0.50, 0.50, 0.80),
        worker=(0.52, 0.55, 0.65, 0.65, 0.75),
        steps=((0.65, 3), (0.75, 1)),
        worker_id=1,
    ),
    ended(),
)

HAND_WORKED = {
    "request_e2e_time": 0.85,
    "request_time_to_first_block": 0.53,
    "request_client_lag": 0.01,
    "request_inter_arrival_delay": 0.0,
    "request_first_block_queue": 0.03 + 0.04,
    "request_scheduling_delay_prefill": 0.07 + 0.03,
    "request_scheduling_delay_decode": 0.05,
    "request_scheduling_delay": 0.15,
    "request_execution_time": 0.70,
    "request_prefill_time": 0.10 + 0.10,
    "request_decode_time": 0.20 + 0.10,
    "request_kv_transfer_time": 0.0,
    "request_kv_transfer_time_nonoverlapped": 0.0,
    "request_unaccounted_time": 0.01 + 0.01 + 0.05 + 0.02 + 0.05 + 0.05,
    "request_e2e_time_excl_first_block_queue": 0.78,
    "request_e2e_time_normalized": 0.85 / 8,
    "request_e2e_time_excl_first_block_queue_normalized": 0.78 / 8,
    "request_execution_time_normalized": 0.70 / 8,
    "request_decode_time_normalized": 0.30 / 8,
    "request_time_between_tokens": (0.15 + 0.10 + 0.20 + 0.10) / 7,
    "request_tokens_unmasked_per_forward_pass": 8 / 5,
    "request_num_prompt_tokens": 10,
    "request_num_gen_tokens": 8,
    "request_num_blocks": 2,
    "request_num_forward_passes": 5,
}


def test_the_hand_worked_request_covers_every_metric() -> None:
    assert HAND_WORKED.keys() == REQUEST_METRICS.keys()


@pytest.mark.parametrize("metric", REQUEST_METRICS)
def test_each_metric_of_a_request(metric: str) -> None:
    row = request_table(run_of(*ONE_REQUEST)).iloc[0]
    assert row[metric] == pytest.approx(HAND_WORKED[metric], abs=1e-9)


def test_blocks_name_their_worker_and_their_times() -> None:
    first, second = block_table(run_of(*ONE_REQUEST)).to_dict("records")
    assert (first["block_id"], first["worker_id"], first["block_num_attempts"]) == ("a_b0", 0, 1)
    assert (second["block_id"], second["worker_id"], second["block_num_tokens"]) == ("a_b1", 1, 4)
    assert first["block_prefill_time"] == pytest.approx(0.10)
    assert first["block_decode_time"] == pytest.approx(0.20)
    assert first["block_kv_transfer_time_nonoverlapped"] == 0
    assert first["block_total_time"] == pytest.approx(0.48)


def test_a_step_of_k_tokens_gives_one_gap_and_zeros_and_the_first_only_zeros() -> None:
    steps = ((0.2, 3), (0.3, 0), (0.5, 2), (0.6, 1))
    run = run_of(
        started(1),
        sent("a"),
        done("a", 0.8, num_gen_tokens=6),
        block("a", 0, scheduler=(0, 0, 0.7), worker=(0, 0.1, 0.2, 0.2, 0.6), steps=steps),
    )
    values = metric_values(run, "request_time_between_tokens", warmup_share=0)
    assert sorted(values) == pytest.approx([0, 0, 0, 0.1, 0.3])
    assert sorted(metric_values(run, "request_tokens_unmasked_per_forward_pass", warmup_share=0)) == [0, 1, 2, 3]


def test_gaps_do_not_reach_from_one_request_to_the_next() -> None:
    one_token = ((0.2, 1),)
    times = (0.0, 0.1, 0.2, 0.2, 0.2)
    run = run_of(
        started(2),
        *(sent(i, n) for n, i in enumerate("ab")),
        *(done(i, 0.5, num_gen_tokens=1) for i in "ab"),
        *(block(i, 0, scheduler=(0, 0, 0.3), worker=times, steps=one_token) for i in "ab"),
    )
    assert metric_values(run, "request_time_between_tokens", warmup_share=0).size == 0


def test_a_failed_attempt_is_waiting_time_of_its_block() -> None:
    run = run_of(
        started(1),
        sent("a"),
        done("a", 3.0),
        failed_block("a", 0, scheduler=(0.0, 0.1, 1.0)),
        block(
            "a",
            0,
            attempt=1,
            worker_id=1,
            scheduler=(1.1, 1.3, 3.0),
            worker=(1.3, 1.5, 2.0, 2.0, 3.0),
            steps=((2.0, 2), (3.0, 2)),
        ),
    )
    row = request_table(run).iloc[0]
    assert row["num_block_retries"] == 1
    assert row["request_scheduling_delay_prefill"] == pytest.approx(1.3 + 0.2)
    assert row["request_first_block_queue"] == pytest.approx(1.5)
    assert row["request_prefill_time"] + row["request_decode_time"] == pytest.approx(1.5)
    assert row["request_unaccounted_time"] == pytest.approx(0.0, abs=1e-9)
    assert row["request_num_blocks"] == 1
    (only,) = block_table(run).to_dict("records")
    assert (only["worker_id"], only["block_num_attempts"], only["block_total_time"]) == (1, 2, pytest.approx(3.0))


LEGS = st.floats(0, 5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(*[LEGS] * 7, st.booleans()), min_size=1, max_size=5), LEGS, LEGS, LEGS)
def test_the_parts_of_a_request_add_up_and_only_the_ways_are_unaccounted(
    blocks: list[tuple[float, float, float, float, float, float, float, bool]], lag: float, to: float, back: float
) -> None:
    """The legs of a block: pending, to the worker, queued, refresh, wait, decode, back to the scheduler."""
    now = lag + to
    ways, waits = to + back, 0.0
    events: list[Event] = []
    for index, (pend, there, queued, refresh, wait, decode, home, is_retried) in enumerate(blocks):
        ready = now
        if is_retried:
            events.append(failed_block("a", index, scheduler=(ready, ready + pend, ready + pend + decode)))
            now += pend + decode
            waits += pend + decode
        routed = now + pend
        received = routed + there
        refresh_start = received + queued
        refresh_end = refresh_start + refresh
        decode_start = refresh_end + wait
        end = decode_start + decode
        worker = (received, refresh_start, refresh_end, decode_start, end)
        attempt = int(is_retried)
        scheduler = (now, routed, end + home)
        events.append(block("a", index, attempt=attempt, scheduler=scheduler, worker=worker, steps=((end, 4),)))
        now = end + home
        ways += there + home
        waits += pend + queued + wait
    run = run_of(started(1), sent("a", lag=lag), done("a", now + back), *events)
    row = request_table(run).iloc[0]
    assert row["request_unaccounted_time"] == pytest.approx(ways, abs=1e-6)
    assert row["request_scheduling_delay"] == pytest.approx(waits, abs=1e-6)
    parts = ("client_lag", "scheduling_delay", "prefill_time", "decode_time", "unaccounted_time")
    assert sum(row[f"request_{part}"] for part in parts) == pytest.approx(row["request_e2e_time"], abs=1e-6)


def test_warmup_and_tail_requests_are_in_no_table() -> None:
    steps = ((0.2, 4),)
    run = run_of(
        sent("w", 0, intended=-2.0, role="warmup"),
        done("w", -1.0),
        started(1),
        sent("a", 0, intended=0.0),
        sent("t", 1, intended=0.5, role="tail"),
        done("a", 1.0),
        done("t", 9.0),
        *(block(i, 0, scheduler=(0, 0, 0.3), worker=(0, 0.1, 0.2, 0.2, 0.2), steps=steps) for i in "at"),
    )
    assert list(request_table(run)["request_id"]) == ["a"]
    assert list(block_table(run)["request_id"]) == ["a"]
    assert summarize(run).num_requests == summarize(run).num_successful == 1
    assert summarize(run).wall_clock_time == pytest.approx(1.0)


def test_a_failed_request_has_no_latency() -> None:
    run = run_of(started(1), sent("a", lag=0.01), done("a", 0.4, status="ERROR"))
    row = request_table(run).iloc[0]
    assert (row["status"], row["error"]) == ("ERROR", "request a was lost")
    assert math.isnan(row["request_e2e_time"])
    assert row["request_client_lag"] == pytest.approx(0.01)


def test_failed_requests_are_infinite_where_a_quantile_is_judged() -> None:
    run = run_of(*simple_requests([1.0, 3.0, None, 2.0]))
    assert metric_values(run, "request_e2e_time", warmup_share=0) == pytest.approx([1, 3, math.inf, 2])
    assert judged_quantile(run, "request_e2e_time", 0.75, warmup_share=0) == pytest.approx(3.0)
    assert judged_quantile(run, "request_e2e_time", 0.76, warmup_share=0) == math.inf
    assert judged_mean(run, "request_e2e_time", warmup_share=0) == math.inf
    assert error_rate(run, warmup_share=0) == 0.25


def test_a_rule_that_asks_for_large_values_can_have_failures_as_the_smallest() -> None:
    run = run_of(*simple_requests([1.0, 3.0, None, 2.0]))
    assert judged_quantile(run, "request_e2e_time", 0.25, warmup_share=0, failure=-math.inf) == -math.inf


def test_a_failed_request_weighs_as_many_tokens_as_it_asked_for() -> None:
    times = (0.0, 0.1, 0.2, 0.2, 0.4)
    run = run_of(
        started(2),
        sent("a", 0),
        sent("b", 1, gen_length=32),
        done("a", 0.5, num_gen_tokens=3),
        done("b", 0.5, status="ERROR"),
        block("a", 0, scheduler=(0, 0, 0.5), worker=times, steps=((0.2, 1), (0.3, 1), (0.4, 1))),
    )
    values = metric_values(run, "request_time_between_tokens", warmup_share=0)
    assert values.size == 2 + 32
    assert judged_quantile(run, "request_time_between_tokens", 2 / 34, warmup_share=0) == pytest.approx(0.1)
    assert judged_quantile(run, "request_time_between_tokens", 0.1, warmup_share=0) == math.inf


def test_a_request_that_was_sent_and_never_ended_counts_as_infinite() -> None:
    run = run_of(started(2), sent("a", 0), sent("b", 1, intended=1.0), done("a", 1.0))
    assert metric_values(run, "request_e2e_time", warmup_share=0) == pytest.approx([1.0, math.inf])
    assert request_table(run).iloc[1]["status"] == "UNFINISHED"


def test_the_first_fifth_in_intended_order_is_not_judged() -> None:
    run = run_of(*simple_requests([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5]))
    assert list(judged_requests(run)["request_id"]) == [f"r{i}" for i in range(2, 10)]
    assert judged_quantile(run, "request_e2e_time", 1.0) == pytest.approx(7.0)
    assert judged_window(run) == pytest.approx((2.0, 9.5))


def test_a_run_cut_short_judges_the_same_requests() -> None:
    start_and_four_requests = simple_requests([1.0] * 10)[: 1 + 2 * 4]
    assert list(judged_requests(run_of(*start_and_four_requests))["request_id"]) == ["r2", "r3"]


def test_nothing_to_judge_is_said() -> None:
    with pytest.raises(RunError, match="no value of request_e2e_time after the warm-up"):
        judged_quantile(run_of(started(5), sent("a"), done("a")), "request_e2e_time", 0.9)
    with pytest.raises(RunError, match="nothing to judge"):
        error_rate(run_of(started(5)))


def test_a_figure_that_needs_the_servers_events_is_missed_by_name() -> None:
    run = run_of(*simple_requests([1.0, 1.0]))
    with pytest.raises(RunError, match="request_decode_time is unknown for 2 completed requests"):
        judged_quantile(run, "request_decode_time", 0.5, warmup_share=0)
    with pytest.raises(RunError, match="request_time_between_tokens is unknown"):
        judged_quantile(run, "request_time_between_tokens", 0.5, warmup_share=0)
    with pytest.raises(RunError, match="queue_depth_waiting is unknown"):
        judged_quantile(run, "queue_depth_waiting", 0.5, warmup_share=0)


def test_an_unknown_metric_is_answered_with_the_nearest() -> None:
    run = run_of(*simple_requests([1.0]))
    with pytest.raises(SlaError, match="did you mean 'request_e2e_time'"):
        judged_quantile(run, "request_e2e_tim", 0.5)


def test_goodput_counts_the_requests_that_meet_every_rule() -> None:
    run = run_of(*simple_requests([1.0, 4.0, None, 2.0, 2.0]))
    assert judged_window(run, 0) == pytest.approx((0.0, 6.0))
    rate = goodput(run, lambda rows: rows["request_e2e_time"] <= 2.5, warmup_share=0)
    assert rate == pytest.approx(3 / 6.0)


def test_the_worst_worker_counts_for_the_queue() -> None:
    run = run_of(
        *simple_requests([10.0]),
        worker_up(worker_id=0),
        worker_up(worker_id=1),
        state(0.0, "busy", waiting=1, worker_id=0),
        state(6.0, "busy", waiting=4, worker_id=0),
        state(2.0, "queued", waiting=9, worker_id=1),
        state(3.0, "busy", waiting=0, worker_id=1),
    )
    assert judged_quantile(run, "queue_depth_waiting", 0.6, warmup_share=0) == 1
    assert judged_quantile(run, "queue_depth_waiting", 0.61, warmup_share=0) == 4
    assert judged_quantile(run, "queue_depth_waiting", 0.95, warmup_share=0) == 9
    assert judged_mean(run, "queue_depth_waiting", warmup_share=0) == pytest.approx(0.6 + 1.6)


def test_depths_are_judged_from_the_first_judged_arrival_on() -> None:
    run = run_of(*simple_requests([1.0] * 5), pending(0.0, 7), pending(1.0, 2), pending(4.0, 0))
    assert judged_window(run) == pytest.approx((1.0, 5.0))
    assert judged_quantile(run, "scheduler_pending_requests", 1.0) == 2
    assert judged_mean(run, "scheduler_pending_requests") == pytest.approx(1.5)


def test_the_last_depth_before_the_window_reaches_into_it() -> None:
    run = run_of(*simple_requests([10.0]), state(-1.0, "busy", waiting=3), state(4.0, "idle"))
    assert judged_mean(run, "queue_depth_waiting", warmup_share=0) == pytest.approx(1.2)
