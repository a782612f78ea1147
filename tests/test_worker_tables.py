"""Workers over time, against a window of ten seconds worked out by hand."""

from __future__ import annotations

import math

import pytest

from dbench.measure.run_data import RunData
from dbench.metrics import batch_table, worker_summary, worker_timeline
from tests.event_builders import (
    batch,
    block,
    done,
    run_of,
    sent,
    simple_requests,
    started,
    state,
    worker_left,
    worker_lost,
    worker_up,
)


def ten_seconds() -> RunData:
    """Worker 0: idle, queued, busy, idle, busy, idle; worker 1: up and never used."""
    return run_of(
        *simple_requests([10.0]),
        worker_up(worker_id=0),
        worker_up(worker_id=1),
        state(1.0, "queued", waiting=2),
        state(2.0, "busy", waiting=1, active=1, pages_used=5),
        state(3.0, "busy", waiting=0, active=2, pages_used=10),
        state(4.0, "idle"),
        state(6.0, "busy", active=1, pages_used=5),
        state(7.0, "idle"),
        batch(2.0, 3.0, prompt_len=14, size=1),
        batch(3.0, 4.0, prompt_len=14, gen_len=4, size=2),
        batch(6.0, 6.5, gen_len=4, size=1),
        batch(6.6, 7.0, gen_len=4, size=1),
    )


def test_states_tile_the_window_of_each_worker() -> None:
    timeline = worker_timeline(ten_seconds())
    first = timeline[timeline["worker_id"] == 0]
    assert list(first["state"]) == ["idle", "queued", "busy", "busy", "idle", "busy", "idle"]
    assert list(first["start_time"]) == pytest.approx([0, 1, 2, 3, 4, 6, 7])
    assert list(first["end_time"]) == pytest.approx([1, 2, 3, 4, 6, 7, 10])
    assert list(first["queue_depth_waiting"]) == [0, 2, 1, 0, 0, 0, 0]
    assert list(first["queue_depth_active"]) == [0, 0, 1, 2, 0, 1, 0]
    assert timeline.groupby("worker_id")["duration_s"].sum().tolist() == pytest.approx([10, 10])


def test_records_that_change_neither_state_nor_depth_are_one_row() -> None:
    run = run_of(*simple_requests([10.0]), state(1.0, "busy", pages_used=1), state(2.0, "busy", pages_used=2))
    timeline = worker_timeline(run)
    assert list(timeline["state"]) == ["idle", "busy"]
    assert list(timeline["duration_s"]) == pytest.approx([1, 9])


def test_the_summary_of_a_worker() -> None:
    used, unused = worker_summary(ten_seconds()).to_dict("records")
    assert used["utilization_ratio"] == pytest.approx(0.3)
    assert (used["num_idle_gaps"], used["p50_idle_gap_s"], used["p95_idle_gap_s"]) == (1, 2.0, 2.0)
    assert used["mean_waiting_queue_depth"] == pytest.approx(0.3)
    assert (used["p50_queue_depth_waiting"], used["p99_queue_depth_waiting"]) == (0, 2)
    assert used["mean_active_batch_size"] == pytest.approx(5 / 4)
    assert used["mean_kv_page_utilization_ratio"] == pytest.approx((0.5 + 1.0 + 0.5) / 10)
    assert used["time_prefill_s"] == pytest.approx(1.0)
    assert used["time_mixed_s"] == pytest.approx(1.0)
    assert used["time_decode_s"] == pytest.approx(0.9)
    assert used["time_queued_s"] == pytest.approx(1.0)
    assert used["time_idle_s"] == pytest.approx(6.0)
    assert used["num_batches"] == 4
    assert (unused["utilization_ratio"], unused["num_idle_gaps"], unused["num_batches"]) == (0, 0, 0)
    assert math.isnan(unused["p50_idle_gap_s"])


def test_a_batch_has_its_phase_its_throughput_and_the_gap_before_it() -> None:
    batches = batch_table(ten_seconds())
    assert list(batches["batch_phase"]) == ["prefill", "mixed", "decode", "decode"]
    assert list(batches["batch_num_tokens"]) == [14, 18, 4, 4]
    assert list(batches["batch_execution_time"]) == pytest.approx([1, 1, 0.5, 0.4])
    assert list(batches["batch_token_throughput"]) == pytest.approx([14, 18, 8, 10])
    assert list(batches["inter_batch_delay"]) == pytest.approx([math.nan, 0, 2.0, 0.1], nan_ok=True)


def test_batches_before_and_after_the_window_are_left_out_and_cut_ones_count_in_part() -> None:
    run = run_of(
        *simple_requests([10.0]),
        worker_up(),
        batch(-3.0, -2.0, gen_len=4),
        batch(-1.0, 1.0, gen_len=4),
        batch(9.5, 10.5, gen_len=4),
        batch(11.0, 12.0, gen_len=4),
    )
    assert list(batch_table(run)["end_time"]) == pytest.approx([1.0, 10.5])
    assert list(batch_table(run)["inter_batch_delay"]) == pytest.approx([1.0, 8.5])
    assert worker_summary(run)["time_decode_s"].tolist() == pytest.approx([1.5])


def test_a_lost_worker_is_lost_until_it_is_up_again() -> None:
    run = run_of(
        *simple_requests([10.0]),
        worker_up(),
        state(1.0, "busy", active=1, pages_used=5),
        worker_lost(3.0),
        worker_up(5.0),
        state(6.0, "busy", active=1),
    )
    timeline = worker_timeline(run)
    assert list(timeline["state"]) == ["idle", "busy", "lost", "idle", "busy"]
    assert list(timeline["queue_depth_active"]) == [0, 1, 0, 0, 1]


def test_a_worker_that_left_has_ended_and_has_no_part_in_the_busy_time() -> None:
    run = run_of(*simple_requests([10.0]), worker_up(), state(1.0, "busy", active=1, pages_used=5), worker_left(3.0))
    timeline = worker_timeline(run)
    assert list(timeline["state"]) == ["idle", "busy", "ended"]
    assert list(timeline["queue_depth_active"]) == [0, 1, 0]


def test_workers_keep_their_batches_apart() -> None:
    run = run_of(
        *simple_requests([10.0]),
        batch(1.0, 2.0, gen_len=4, worker_id=1),
        batch(0.0, 3.0, gen_len=4, worker_id=0),
        batch(2.5, 4.0, gen_len=4, worker_id=1),
    )
    batches = batch_table(run)
    assert list(batches["worker_id"]) == [0, 1, 1]
    assert list(batches["inter_batch_delay"]) == pytest.approx([math.nan, math.nan, 0.5], nan_ok=True)


def test_a_run_without_server_events_has_empty_tables() -> None:
    run = run_of(*simple_requests([1.0]))
    assert worker_timeline(run).empty
    assert batch_table(run).empty
    assert worker_summary(run).empty


def test_the_window_of_an_unfinished_run_ends_with_its_last_event() -> None:
    times = (0.0, 0.1, 0.2, 0.2, 0.4)
    run = run_of(
        started(2),
        sent("a"),
        sent("b", 1, intended=1.0),
        done("a", 2.0),
        block("b", 0, scheduler=(1, 1, 7.0), worker=times, steps=((0.2, 4),)),
        state(3.0, "busy"),
    )
    assert list(worker_timeline(run)["duration_s"]) == pytest.approx([3.0, 4.0])
