"""Workers over time: their states, one summary row each, and depths over any stretch of the window.

Times are seconds from t = 0, the first intended arrival.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dbench.measure.run_data import RunData
from dbench.metric_names import WORKER_METRICS
from dbench.quantiles import quantiles, time_weighted_mean, time_weighted_quantile

PHASES = ("prefill", "mixed", "decode")


def worker_timeline(data: RunData) -> pd.DataFrame:
    """A row per interval in which a worker's state and both depths stayed as they were."""
    intervals = data.worker_intervals
    same = ["worker_id", "worker_type", "state", "queue_depth_waiting", "queue_depth_active"]
    merged = _merge(intervals, same)
    return pd.DataFrame(
        {
            "worker_id": merged["worker_id"],
            "worker_type": merged["worker_type"],
            "state": merged["state"],
            "start_time": merged["start_time"],
            "end_time": merged["end_time"],
            "duration_s": merged["end_time"] - merged["start_time"],
            "queue_depth_waiting": merged["queue_depth_waiting"],
            "queue_depth_active": merged["queue_depth_active"],
        }
    )


def worker_summary(data: RunData) -> pd.DataFrame:
    """One row per worker with the columns of WORKER_METRICS."""
    intervals, batches = data.worker_intervals, data.batches
    rows = [
        _summary_row(worker_id, own, batches[batches["worker_id"] == worker_id], data.window.length_s)
        for worker_id, own in intervals.groupby("worker_id")
    ]
    return pd.DataFrame(rows, columns=["worker_id", "worker_type", *WORKER_METRICS])


def worst_depth_quantile(data: RunData, q: float, start: float, end: float) -> float | None:
    """The q-quantile over [start, end) of the refreshes that wait in a worker, in the worst of the workers."""
    per_worker = _clipped(data.worker_intervals, start, end).groupby("worker_id")
    depths = [time_weighted_quantile(w["queue_depth_waiting"], w["duration_s"], q) for _, w in per_worker]
    return max(depths, default=None)


def worst_depth_mean(data: RunData, start: float, end: float) -> float | None:
    """The mean over [start, end) of the refreshes that wait in a worker, in the worst of the workers."""
    per_worker = _clipped(data.worker_intervals, start, end).groupby("worker_id")
    return max((time_weighted_mean(w["queue_depth_waiting"], w["duration_s"]) for _, w in per_worker), default=None)


def scheduler_quantile(data: RunData, column: str, q: float, start: float, end: float) -> float | None:
    """The q-quantile over [start, end) of a depth of the scheduler."""
    depth = _clipped(data.scheduler_intervals, start, end)
    return time_weighted_quantile(depth[column], depth["duration_s"], q) if len(depth) else None


def scheduler_mean(data: RunData, column: str, start: float, end: float) -> float | None:
    """The mean over [start, end) of a depth of the scheduler."""
    depth = _clipped(data.scheduler_intervals, start, end)
    return time_weighted_mean(depth[column], depth["duration_s"]) if len(depth) else None


def _summary_row(worker_id: object, own: pd.DataFrame, batches: pd.DataFrame, window: float) -> dict[str, object]:
    duration = own["end_time"] - own["start_time"]
    in_state = duration.groupby(own["state"]).sum()
    in_window = batches["end_time"].clip(upper=window) - batches["start_time"].clip(lower=0)
    in_phase = in_window.groupby(batches["batch_phase"]).sum()
    gaps = _idle_gaps(own)
    p50_gap, p95_gap = quantiles(gaps, (0.5, 0.95)) if gaps.size else (np.nan, np.nan)
    waiting = own["queue_depth_waiting"]
    return {
        "worker_id": worker_id,
        "worker_type": own["worker_type"].iloc[0],
        "utilization_ratio": in_state.get("busy", 0.0) / duration.sum(),
        "num_idle_gaps": gaps.size,
        "p50_idle_gap_s": p50_gap,
        "p95_idle_gap_s": p95_gap,
        "mean_waiting_queue_depth": time_weighted_mean(waiting, duration),
        "p50_queue_depth_waiting": time_weighted_quantile(waiting, duration, 0.5),
        "p99_queue_depth_waiting": time_weighted_quantile(waiting, duration, 0.99),
        "mean_active_batch_size": batches["batch_size"].mean(),
        "mean_kv_page_utilization_ratio": time_weighted_mean(own["kv_page_utilization_ratio"], duration),
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
