"""Figures of hybrid mode: KV transfers, two kinds of workers, and the requests that wait for pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbench.events import BlockFinished
from dbench.metrics import block_table, judged_mean, judged_quantile, request_table, worker_summary, worker_timeline
from tests.event_builders import (
    START_S,
    arrived,
    block,
    done,
    ended,
    pending,
    run_of,
    sent,
    simple_requests,
    started,
    state,
    worker_up,
)


def split_block(index: int, shift: float, transfer: tuple[float, float], decode_start: float) -> BlockFinished:
    """Refreshed on worker 0 from 0.1 to 0.3 s after `shift`, decoded on worker 2 until 0.8."""
    whole = block(
        "a",
        index,
        scheduler=(shift, shift + 0.02, shift + 0.9),
        worker=(shift + 0.03, shift + 0.1, shift + 0.3, shift + decode_start, shift + 0.8),
        steps=((shift + 0.3, 1), (shift + 0.8, 3)),
        worker_id=2,
    )
    start_s, end_s = (START_S + shift + moment for moment in transfer)
    return replace(whole, prefill_worker_id=0, kv_transfer_start_s=start_s, kv_transfer_end_s=end_s)


def run_with(*blocks: BlockFinished) -> list[dict[str, float]]:
    """The block rows of one request, then its own row."""
    end = 1.0 * len(blocks)
    run = run_of(started(1), sent("a", gen_length=8), arrived("a", 0.0), *blocks, done("a", end), ended())
    tables = (block_table(run), request_table(run))
    return [{str(name): value for name, value in row.items()} for table in tables for row in table.to_dict("records")]


def test_a_transfer_that_starts_during_the_refresh_counts_as_far_as_it_outlasts_it() -> None:
    row, request = run_with(split_block(0, 0.0, transfer=(0.15, 0.35), decode_start=0.4))
    assert row["block_kv_transfer_time"] == pytest.approx(0.20)
    assert row["block_kv_transfer_time_nonoverlapped"] == pytest.approx(0.05)
    assert row["block_scheduling_delay_decode"] == pytest.approx(0.05)
    assert (row["worker_id"], row["prefill_worker_id"]) == (2, 0)
    assert request["request_kv_transfer_time"] == pytest.approx(0.20)


def test_a_transfer_that_starts_after_the_refresh_has_waited_for_pages_until_then() -> None:
    row, _ = run_with(split_block(0, 0.0, transfer=(0.45, 0.55), decode_start=0.6))
    assert row["block_kv_transfer_time_nonoverlapped"] == pytest.approx(0.10)
    assert row["block_scheduling_delay_decode"] == pytest.approx(0.15 + 0.05)


def test_clocks_that_disagree_make_no_time_negative() -> None:
    row, _ = run_with(split_block(0, 0.0, transfer=(0.31, 0.305), decode_start=0.4))
    assert row["block_kv_transfer_time"] == row["block_kv_transfer_time_nonoverlapped"] == 0


def test_the_parts_of_a_request_tile_its_blocks() -> None:
    *rows, request = run_with(
        split_block(0, 0.0, transfer=(0.15, 0.35), decode_start=0.4),
        split_block(1, 1.0, transfer=(0.45, 0.55), decode_start=0.6),
    )
    parts = ("scheduling_delay_prefill", "prefill_time", "kv_transfer_time_nonoverlapped", "scheduling_delay_decode")
    for row in rows:
        whole = sum(row[f"block_{part}"] for part in (*parts, "decode_time"))
        assert whole == pytest.approx(0.02 + (0.8 - 0.03))  # its wait in the scheduler, then received to end
    assert request["request_kv_transfer_time"] == pytest.approx(0.3)
    assert request["request_kv_transfer_time_nonoverlapped"] == pytest.approx(0.15)
    assert request["request_unaccounted_time"] == pytest.approx(2.0 - 2 * 0.79)


def test_workers_are_of_two_kinds() -> None:
    prefill = replace(worker_up(worker_id=0), worker_type="prefill")
    run = run_of(*simple_requests([10.0]), prefill, worker_up(worker_id=1), state(1.0, "busy"))
    assert dict(zip(worker_summary(run)["worker_id"], worker_summary(run)["worker_type"], strict=True)) == {
        0: "prefill",
        1: "colocated",
    }
    assert set(worker_timeline(run)["worker_type"]) == {"prefill", "colocated"}


def test_requests_that_wait_for_pages_are_counted_over_time() -> None:
    depths = [replace(pending(at, 0), decode_ready_requests=count) for at, count in ((0.0, 1), (5.0, 3))]
    run = run_of(*simple_requests([10.0]), *depths)
    assert judged_quantile(run, "scheduler_decode_ready_requests", 1.0) == 3
    assert judged_mean(run, "scheduler_decode_ready_requests") == pytest.approx(2.0)
