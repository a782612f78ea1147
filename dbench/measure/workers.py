"""Workers over time: their states, their batches, and one summary row each.

Times are seconds from t = 0, the first intended arrival; the window ends when the last measured request is
final. Before its first recorded state a worker is idle and empty; after its last one nothing changes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dbench.events import BatchExecuted, SchedulerDepth, WorkerLost, WorkerState, WorkerUp
from dbench.measure.run_data import RunData
from dbench.metric_names import WORKER_METRICS
from dbench.quantiles import quantiles, time_weighted_mean, time_weighted_quantile

WORKER_TYPE = "colocated"
PHASES = ("prefill", "mixed", "decode")

_DEPTHS = (
    "queue_depth_waiting",
    "queue_depth_active",
    "outstanding_prefill_tokens",
    "decode_length_sum",
    "pages_used",
    "pages_total",
    "deficit_tokens",
)


def worker_intervals(data: RunData) -> pd.DataFrame:
    """One row per recorded state, in the window, tiling it for each worker: worker_id, start_time, end_time, state,
    and the depths, token sums and pages of WorkerState. A worker whose stream ended is `lost` until it is up again.
    """
    states = data.log.of(WorkerState)
    recorded = pd.DataFrame(
        {
            "worker_id": [e.worker_id for e in states],
            "at_s": [e.at_s for e in states],
            "state": [e.state for e in states],
            "queue_depth_waiting": [e.queue_depth_waiting for e in states],
            "queue_depth_active": [e.queue_depth_active for e in states],
            "outstanding_prefill_tokens": [e.outstanding_prefill_tokens for e in states],
            "decode_length_sum": [e.decode_length_sum for e in states],
            "pages_used": [e.pages_used for e in states],
            "pages_total": [e.pages_total for e in states],
            "deficit_tokens": [e.deficit_tokens for e in states],
        }
    )
    pages = {e.worker_id: e.pages_total for e in states}
    pages |= {e.worker_id: e.pages_total for e in data.log.of(WorkerUp)}
    changes = [(e.worker_id, e.at_s, "idle") for e in data.log.of(WorkerUp)]
    changes += [(e.worker_id, e.at_s, "lost") for e in data.log.of(WorkerLost)]
    changes += [(worker_id, -np.inf, "idle") for worker_id in {*pages, *(c[0] for c in changes)}]
    empty = pd.DataFrame(changes, columns=["worker_id", "at_s", "state"])
    empty = empty.assign(**dict.fromkeys(_DEPTHS, 0))
    empty["pages_total"] = [pages.get(worker_id, 0) for worker_id in empty["worker_id"]]
    both = pd.concat([empty, recorded]) if states else empty
    both = both.sort_values(["worker_id", "at_s"], kind="stable").reset_index(drop=True)
    return _tile(both, ["worker_id"], data)


def scheduler_intervals(data: RunData) -> pd.DataFrame:
    """start_time, end_time, scheduler_pending_requests, pending_prefill_tokens, tiling the window."""
    depths = data.log.of(SchedulerDepth)
    recorded = pd.DataFrame(
        {
            "at_s": np.array([-np.inf, *(e.at_s for e in depths)]),
            "scheduler_pending_requests": [0, *(e.pending_requests for e in depths)],
            "pending_prefill_tokens": [0, *(e.pending_prefill_tokens for e in depths)],
        }
    )
    return _tile(recorded.sort_values("at_s", kind="stable").reset_index(drop=True), [], data)


def worker_timeline(data: RunData) -> pd.DataFrame:
    """A row per interval in which a worker's state and both depths stayed as they were."""
    intervals = worker_intervals(data)
    same = ["worker_id", "state", "queue_depth_waiting", "queue_depth_active"]
    merged = _merge(intervals, same)
    return pd.DataFrame(
        {
            "worker_id": merged["worker_id"],
            "worker_type": pd.Series(WORKER_TYPE, index=merged.index, dtype=object),
            "state": merged["state"],
            "start_time": merged["start_time"],
            "end_time": merged["end_time"],
            "duration_s": merged["end_time"] - merged["start_time"],
            "queue_depth_waiting": merged["queue_depth_waiting"],
            "queue_depth_active": merged["queue_depth_active"],
        }
    )


def batch_table(data: RunData) -> pd.DataFrame:
    """A row per batch that ran in the window, by worker and time; columns of BATCH_METRICS and their times."""
    batches = data.log.of(BatchExecuted)
    start = np.array([e.start_s for e in batches], dtype=np.float64) - data.start_s
    end = np.array([e.at_s for e in batches], dtype=np.float64) - data.start_s
    prompt_len = np.array([e.batch_prompt_len for e in batches], dtype=np.int64)
    gen_len = np.array([e.batch_gen_len for e in batches], dtype=np.int64)
    duration = end - start
    throughput = np.divide(prompt_len + gen_len, duration, out=np.full(len(batches), np.nan), where=duration > 0)
    table = pd.DataFrame(
        {
            "worker_id": np.array([e.worker_id for e in batches], dtype=np.int64),
            "start_time": start,
            "end_time": end,
            "batch_phase": _phases(prompt_len, gen_len),
            "batch_size": np.array([e.batch_size for e in batches], dtype=np.int64),
            "batch_num_tokens": prompt_len + gen_len,
            "batch_prompt_len": prompt_len,
            "batch_gen_len": gen_len,
            "batch_num_void_tokens": np.array([e.batch_num_void_tokens for e in batches], dtype=np.int64),
            "batch_num_unmasked_tokens": np.array([e.batch_num_unmasked_tokens for e in batches], dtype=np.int64),
            "batch_decode_length_std": np.array([e.batch_decode_length_std for e in batches], dtype=np.float64),
            "batch_execution_time": duration,
            "batch_sampling_time": np.array([e.batch_sampling_time for e in batches], dtype=np.float64),
            "batch_token_throughput": throughput,
        }
    )
    table = table.sort_values(["worker_id", "end_time"], kind="stable").reset_index(drop=True)
    table["inter_batch_delay"] = table["start_time"] - table.groupby("worker_id")["end_time"].shift()
    in_window = (table["end_time"] > 0) & (table["start_time"] < data.end_s - data.start_s)
    return table[in_window].reset_index(drop=True)


def worker_summary(data: RunData) -> pd.DataFrame:
    """One row per worker with the columns of WORKER_METRICS."""
    intervals, batches = worker_intervals(data), batch_table(data)
    rows = [
        _summary_row(worker_id, own, batches[batches["worker_id"] == worker_id], data.end_s - data.start_s)
        for worker_id, own in intervals.groupby("worker_id")
    ]
    return pd.DataFrame(rows, columns=["worker_id", "worker_type", *WORKER_METRICS])


def worst_depth_quantile(data: RunData, q: float, start: float, end: float) -> float | None:
    """The q-quantile over [start, end) of the refreshes that wait in a worker, in the worst of the workers."""
    per_worker = _clipped(worker_intervals(data), start, end).groupby("worker_id")
    depths = [time_weighted_quantile(w["queue_depth_waiting"], w["duration_s"], q) for _, w in per_worker]
    return max(depths, default=None)


def worst_depth_mean(data: RunData, start: float, end: float) -> float | None:
    """The mean over [start, end) of the refreshes that wait in a worker, in the worst of the workers."""
    per_worker = _clipped(worker_intervals(data), start, end).groupby("worker_id")
    return max((time_weighted_mean(w["queue_depth_waiting"], w["duration_s"]) for _, w in per_worker), default=None)


def pending_quantile(data: RunData, q: float, start: float, end: float) -> float | None:
    """The q-quantile over [start, end) of the requests that the scheduler holds back."""
    depth = _clipped(scheduler_intervals(data), start, end)
    return time_weighted_quantile(depth["scheduler_pending_requests"], depth["duration_s"], q) if len(depth) else None


def pending_mean(data: RunData, start: float, end: float) -> float | None:
    """The mean over [start, end) of the requests that the scheduler holds back."""
    depth = _clipped(scheduler_intervals(data), start, end)
    return time_weighted_mean(depth["scheduler_pending_requests"], depth["duration_s"]) if len(depth) else None


def _summary_row(worker_id: object, own: pd.DataFrame, batches: pd.DataFrame, window: float) -> dict[str, object]:
    duration = own["end_time"] - own["start_time"]
    in_state = duration.groupby(own["state"]).sum()
    in_window = batches["end_time"].clip(upper=window) - batches["start_time"].clip(lower=0)
    in_phase = in_window.groupby(batches["batch_phase"]).sum()
    gaps = _idle_gaps(own)
    p50_gap, p95_gap = quantiles(gaps, (0.5, 0.95)) if gaps.size else (np.nan, np.nan)
    waiting = own["queue_depth_waiting"]
    used = (own["pages_used"] / own["pages_total"].where(own["pages_total"] > 0)).fillna(0)
    return {
        "worker_id": worker_id,
        "worker_type": WORKER_TYPE,
        "utilization_ratio": in_state.get("busy", 0.0) / duration.sum(),
        "num_idle_gaps": gaps.size,
        "p50_idle_gap_s": p50_gap,
        "p95_idle_gap_s": p95_gap,
        "mean_waiting_queue_depth": time_weighted_mean(waiting, duration),
        "p50_queue_depth_waiting": time_weighted_quantile(waiting, duration, 0.5),
        "p99_queue_depth_waiting": time_weighted_quantile(waiting, duration, 0.99),
        "mean_active_batch_size": batches["batch_size"].mean(),
        "mean_kv_page_utilization_ratio": time_weighted_mean(used, duration),
        **{f"time_{phase}_s": float(in_phase.get(phase, 0.0)) for phase in PHASES},
        "time_queued_s": float(in_state.get("queued", 0.0)),
        "time_idle_s": float(in_state.get("idle", 0.0)),
        "num_batches": len(batches),
    }


def _idle_gaps(own: pd.DataFrame) -> NDArray[np.float64]:
    """Lengths of one worker's idle intervals between its first and its last busy moment."""
    runs = _merge(own, ["state"])
    busy = np.flatnonzero(runs["state"] == "busy")
    if busy.size == 0:
        return np.empty(0)
    inner = runs.iloc[busy[0] : busy[-1]]
    idle = inner[inner["state"] == "idle"]
    return (idle["end_time"] - idle["start_time"]).to_numpy(dtype=np.float64)


def _phases(prompt_len: NDArray[np.int64], gen_len: NDArray[np.int64]) -> pd.Series:
    phases = np.where(gen_len == 0, "prefill", np.where(prompt_len == 0, "decode", "mixed"))
    return pd.Series(phases, dtype=object)


def _tile(recorded: pd.DataFrame, keys: list[str], data: RunData) -> pd.DataFrame:
    """Sorted records with `at_s` become intervals that end where the next of the same key begins, cut to the window."""
    window = data.end_s - data.start_s
    start = recorded["at_s"] - data.start_s
    following = start.groupby([recorded[k] for k in keys]).shift(-1) if keys else start.shift(-1)
    end = following.fillna(window).clip(upper=window)
    table = recorded.drop(columns="at_s")
    table.insert(len(keys), "start_time", start.clip(lower=0))
    table.insert(len(keys) + 1, "end_time", end)
    return table[table["end_time"] > table["start_time"]].reset_index(drop=True)


def _merge(intervals: pd.DataFrame, same: list[str]) -> pd.DataFrame:
    """Neighbouring intervals with equal `same` columns become one."""
    if intervals.empty:
        return intervals[[*same, "start_time", "end_time"]]
    changed = (intervals[same] != intervals[same].shift()).any(axis=1)
    first = intervals[changed]
    last = changed.shift(-1, fill_value=True)
    merged = first[[*same, "start_time"]].reset_index(drop=True)
    merged["end_time"] = intervals.loc[last, "end_time"].to_numpy()
    return merged


def _clipped(intervals: pd.DataFrame, start: float, end: float) -> pd.DataFrame:
    """The intervals inside [start, end), with their duration_s there."""
    table = intervals.assign(
        duration_s=intervals["end_time"].clip(upper=end) - intervals["start_time"].clip(lower=start)
    )
    return table[table["duration_s"] > 0]
