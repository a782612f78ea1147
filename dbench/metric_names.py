"""Every metric's name, unit and meaning; for requests also the formula. A new request metric is one entry here.

A formula reads the raw columns of the request frame (see `run_data.py`) and the metrics above it in the table.
Moments are seconds of one clock, the client's; durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Metric:
    """What a column holds."""

    unit: str
    """s, s/token, tokens, tokens/pass, tokens/s, 1 (a share or a count)."""
    definition: str


@dataclass(frozen=True, slots=True)
class RequestMetric:
    """One figure per request, or a distribution whose mean stands in the request's row."""

    unit: str
    label: str
    """For an axis."""
    definition: str
    how: Callable[[pd.DataFrame], pd.Series]
    only_completed: bool = True
    """A request that did not complete has no such figure."""
    is_distribution: bool = False
    """Over all tokens or steps; quantiles are taken over those, not over the requests' means."""


def _per_token(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda t: t[name] / t["num_gen_tokens"].where(t["num_gen_tokens"] > 0)


REQUEST_METRICS: dict[str, RequestMetric] = {
    "request_e2e_time": RequestMetric(
        "s",
        "end-to-end latency",
        "From the intended send to the complete result at the client.",
        lambda t: t["done_s"] - t["intended_s"],
    ),
    "request_time_to_first_block": RequestMetric(
        "s",
        "time to first block",
        "From the intended send to the first finished block at the client.",
        lambda t: t["first_block_s"] - t["intended_s"],
    ),
    "request_client_lag": RequestMetric(
        "s",
        "send lag",
        "Actual minus intended send: the load generator's own delay.",
        lambda t: t["sent_s"] - t["intended_s"],
        only_completed=False,
    ),
    "request_inter_arrival_delay": RequestMetric(
        "s",
        "gap between arrivals",
        "Intended send minus that of the measured request before it; the first counts from t = 0.",
        lambda t: t["intended_s"].diff().fillna(t["intended_s"] - t["start_s"]),
        only_completed=False,
    ),
    "request_first_block_queue": RequestMetric(
        "s",
        "wait of the first block",
        "Wait of block 0 in scheduler and worker before its refresh.",
        lambda t: t["first_block_queue_s"],
    ),
    "request_scheduling_delay_prefill": RequestMetric(
        "s",
        "wait before refreshes",
        "Over all blocks: from ready to routed in the scheduler, plus from received to the start of the refresh in the "
        "worker. A failed attempt counts here in full: ready is that of the first attempt, routed that of the last.",
        lambda t: t["scheduling_delay_prefill_s"],
    ),
    "request_scheduling_delay_decode": RequestMetric(
        "s",
        "wait before first decode steps",
        "Over all blocks: from the end of the refresh to the start of the first decode step; in hybrid mode without "
        "the KV transfer between them.",
        lambda t: t["scheduling_delay_decode_s"],
    ),
    "request_scheduling_delay": RequestMetric(
        "s",
        "scheduling delay",
        "request_scheduling_delay_prefill + request_scheduling_delay_decode.",
        lambda t: t["request_scheduling_delay_prefill"] + t["request_scheduling_delay_decode"],
    ),
    "request_execution_time": RequestMetric(
        "s",
        "execution time",
        "request_e2e_time - request_scheduling_delay.",
        lambda t: t["request_e2e_time"] - t["request_scheduling_delay"],
    ),
    "request_prefill_time": RequestMetric(
        "s",
        "prefill time",
        "Over all blocks: duration of the batch that held the refresh.",
        lambda t: t["prefill_s"],
    ),
    "request_decode_time": RequestMetric(
        "s",
        "decode time",
        "Over all blocks: from the start of the first decode step to the end of the block, gaps included.",
        lambda t: t["decode_s"],
    ),
    "request_kv_transfer_time": RequestMetric(
        "s",
        "KV transfer time",
        "Over all blocks: from the start of sending KV pages to the last layer's arrival; 0 in colocated mode.",
        lambda t: t["kv_transfer_s"],
    ),
    "request_kv_transfer_time_nonoverlapped": RequestMetric(
        "s",
        "KV transfer time outside the refresh",
        "The part of request_kv_transfer_time after the refresh; 0 in colocated mode.",
        lambda t: t["kv_transfer_nonoverlapped_s"],
    ),
    "request_unaccounted_time": RequestMetric(
        "s",
        "unaccounted time",
        "request_e2e_time minus client lag, scheduling delay, prefill, non-overlapped KV transfer and decode: the ways "
        "client to scheduler, scheduler to worker and back, and to the client.",
        lambda t: (
            t["request_e2e_time"]
            - t["request_client_lag"]
            - t["request_scheduling_delay"]
            - t["request_prefill_time"]
            - t["request_kv_transfer_time_nonoverlapped"]
            - t["request_decode_time"]
        ),
    ),
    "request_e2e_time_excl_first_block_queue": RequestMetric(
        "s",
        "latency without the first wait",
        "request_e2e_time - request_first_block_queue.",
        lambda t: t["request_e2e_time"] - t["request_first_block_queue"],
    ),
    "request_e2e_time_normalized": RequestMetric(
        "s/token",
        "latency per token",
        "request_e2e_time per generated token.",
        _per_token("request_e2e_time"),
    ),
    "request_e2e_time_excl_first_block_queue_normalized": RequestMetric(
        "s/token",
        "latency per token without the first wait",
        "request_e2e_time_excl_first_block_queue per generated token.",
        _per_token("request_e2e_time_excl_first_block_queue"),
    ),
    "request_execution_time_normalized": RequestMetric(
        "s/token",
        "execution time per token",
        "request_execution_time per generated token.",
        _per_token("request_execution_time"),
    ),
    "request_decode_time_normalized": RequestMetric(
        "s/token",
        "decode time per token",
        "request_decode_time per generated token.",
        _per_token("request_decode_time"),
    ),
    "request_time_between_tokens": RequestMetric(
        "s",
        "time between tokens",
        "A step that fixes k tokens gives the gap since the last step that fixed any, and k - 1 zeros; the first such "
        "step of a request only k - 1 zeros. Row: the mean.",
        lambda t: t["mean_gap_s"],
        is_distribution=True,
    ),
    "request_tokens_unmasked_per_forward_pass": RequestMetric(
        "tokens/pass",
        "tokens per forward pass",
        "Returned tokens that a forward pass fixed, refreshes included. Row: the mean.",
        lambda t: t["mean_tokens_per_pass"].fillna(t["num_gen_tokens"] / t["num_forward_passes"]),
        is_distribution=True,
    ),
    "request_num_prompt_tokens": RequestMetric(
        "tokens",
        "prompt length",
        "Length of the prompt.",
        lambda t: t["num_prompt_tokens"],
        only_completed=False,
    ),
    "request_num_gen_tokens": RequestMetric(
        "tokens",
        "generated length",
        "Generated tokens returned, the first end-of-text id included and nothing after it.",
        lambda t: t["num_gen_tokens"],
    ),
    "request_num_blocks": RequestMetric("1", "blocks", "Blocks decoded to their end.", lambda t: t["num_blocks"]),
    "request_num_forward_passes": RequestMetric(
        "1", "forward passes", "Refreshes + decode steps.", lambda t: t["num_forward_passes"]
    ),
}

BLOCK_METRICS: dict[str, Metric] = {
    "block_scheduling_delay_prefill": Metric("s", "The block's part of request_scheduling_delay_prefill."),
    "block_scheduling_delay_decode": Metric("s", "The block's part of request_scheduling_delay_decode."),
    "block_prefill_time": Metric("s", "Duration of the batch that held the refresh."),
    "block_kv_transfer_time": Metric(
        "s", "From the start of sending KV pages to the last layer's arrival; 0 in colocated mode."
    ),
    "block_kv_transfer_time_nonoverlapped": Metric("s", "KV transfer after the refresh; 0 in colocated mode."),
    "block_decode_time": Metric("s", "From the start of the first decode step to the end, gaps included."),
    "block_total_time": Metric("s", "From the moment it could first be routed to its end at the scheduler."),
    "block_num_forward_passes": Metric("1", "The refresh and the decode steps of the last attempt."),
    "block_num_tokens": Metric("tokens", "Returned tokens."),
    "block_num_attempts": Metric("1", "1, or more where the block was restarted."),
}

BATCH_METRICS: dict[str, Metric] = {
    "batch_phase": Metric("", "prefill (refresh rows only), decode (decode rows only) or mixed."),
    "batch_size": Metric("1", "Sequences in the batch."),
    "batch_num_tokens": Metric("tokens", "batch_prompt_len + batch_gen_len."),
    "batch_prompt_len": Metric("tokens", "Rows of refreshes."),
    "batch_gen_len": Metric("tokens", "Rows of decode steps, void ones included."),
    "batch_num_void_tokens": Metric("tokens", "Rows planned for a block that had already ended."),
    "batch_num_unmasked_tokens": Metric("tokens", "Tokens fixed."),
    "batch_decode_length_std": Metric(
        "tokens", "Population standard deviation of the decoding canvases; empty below two."
    ),
    "batch_execution_time": Metric("s", "From the later of its launch and the previous completion to its completion."),
    "batch_sampling_time": Metric("s", "Time spent in choosing tokens and positions; on CUDA with the LM head."),
    "batch_token_throughput": Metric("tokens/s", "batch_num_tokens / batch_execution_time."),
    "inter_batch_delay": Metric("s", "From the worker's previous completion to its start; empty for the first."),
    "batch_op_attn_time": Metric("s", "Attention of all layers, in sampled batches (enable_operation_metrics)."),
    "batch_op_mlp_time": Metric("s", "The MLPs of all layers with the normalisation before them, likewise."),
    "batch_op_qkv_time": Metric("s", "QKV projection, rotary positions and page write of all layers, likewise."),
}

WORKER_METRICS: dict[str, Metric] = {
    "utilization_ratio": Metric("1", "Share of the window in which the worker was busy."),
    "num_idle_gaps": Metric("1", "Idle intervals between the first and the last busy moment."),
    "p50_idle_gap_s": Metric("s", "Median of those intervals; empty without any."),
    "p95_idle_gap_s": Metric("s", "Their 95th percentile."),
    "mean_waiting_queue_depth": Metric("1", "Refreshes waiting, averaged over time."),
    "p50_queue_depth_waiting": Metric("1", "Median over time of the refreshes waiting."),
    "p99_queue_depth_waiting": Metric("1", "Their 99th percentile over time."),
    "mean_active_batch_size": Metric("1", "Sequences per batch, averaged over batches."),
    "mean_kv_page_utilization_ratio": Metric("1", "Pages in use over all pages, averaged over time."),
    "time_prefill_s": Metric("s", "Time in prefill batches."),
    "time_mixed_s": Metric("s", "Time in mixed batches."),
    "time_decode_s": Metric("s", "Time in decode batches."),
    "time_queued_s": Metric("s", "Work waited and nothing ran."),
    "time_idle_s": Metric("s", "Nothing to do."),
    "num_batches": Metric("1", "Batches that ended in the window."),
}

DEPTH_METRICS: dict[str, Metric] = {
    "queue_depth_waiting": Metric("1", "Refreshes that wait in a worker, over time; the worst worker counts."),
    "scheduler_pending_requests": Metric("1", "Requests with a block that no worker has yet, over time."),
    "scheduler_decode_ready_requests": Metric(
        "1", "Requests with a refreshed block that no worker has pages to decode, over time; 0 in colocated mode."
    ),
}

SLA_METRICS: tuple[str, ...] = (*REQUEST_METRICS, *DEPTH_METRICS)
"""What `judged_quantile` and `judged_mean` know."""
