"""The tables behind the figures of a run: what a figure draws is one of these, rounded as its CSV is.

Times are seconds from t = 0, the first intended arrival; a curve has at most MAX_POINTS points.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from dbench.measure.run_data import COMPLETED, RunData
from dbench.measure.workers import PHASES
from dbench.quantiles import cumulative_distribution

MAX_POINTS = 1001
NUM_BINS = 250
"""Of a worker's curve: finer ones are noise to the eye, and worker_timeline.csv has every change."""

ALL_WORKERS = "all"

STATE_RATIOS = (*(f"{phase}_ratio" for phase in PHASES), "queued_ratio", "lost_ratio")


def cdf_table(metric: str, values: ArrayLike, worker_id: str = ALL_WORKERS) -> pd.DataFrame:
    """Columns cdf, `metric`, worker_id; infinite values keep the last share below 1."""
    shares, steps = cumulative_distribution(values, MAX_POINTS)
    return pd.DataFrame({"cdf": shares, metric: steps, "worker_id": pd.Series(worker_id, range(len(shares)), object)})


def metric_cdf(data: RunData, metric: str) -> pd.DataFrame:
    """The distribution of a metric over all measured requests that have an end; a failed one is infinite.

    Of tokens and steps, those of completed requests.
    """
    if metric in data.steps.by_metric:
        completed_rows = np.flatnonzero(data.requests["status"] == COMPLETED)
        return cdf_table(metric, data.steps.by_metric[metric].of_rows(completed_rows))
    final = data.requests[data.requests["done_s"].notna()]
    completed = final["status"] == COMPLETED
    known = final.loc[completed, metric].dropna().to_numpy(dtype=np.float64)
    return cdf_table(metric, np.concatenate([known, np.full(int((~completed).sum()), np.inf)]))


def arrivals_and_completions(data: RunData) -> pd.DataFrame:
    """Cumulated counts: time_s, arrivals (intended sends), completions, failures, in_flight."""
    requests = data.requests
    completed = requests["status"] == COMPLETED
    arrivals = _moments(requests["intended_s"], data)
    completions = _moments(requests.loc[completed, "done_s"], data)
    failures = _moments(requests.loc[~completed, "done_s"], data)
    times = np.unique(np.concatenate([[0.0, data.window.length_s], arrivals, completions, failures]))
    if times.size > MAX_POINTS:
        times = np.linspace(0.0, times[-1], MAX_POINTS)
    counts = {
        name: np.searchsorted(moments, times, side="right")
        for name, moments in (("arrivals", arrivals), ("completions", completions), ("failures", failures))
    }
    in_flight = counts["arrivals"] - counts["completions"] - counts["failures"]
    return pd.DataFrame({"time_s": times, **counts, "in_flight": in_flight})


def worker_depths(data: RunData) -> pd.DataFrame:
    """Means over NUM_BINS equal intervals, time_s their middles: time_s, queue_depth_waiting, queue_depth_active,
    kv_page_utilization_ratio, worker_id.
    """
    intervals = data.worker_intervals
    names = ("queue_depth_waiting", "queue_depth_active", "kv_page_utilization_ratio")
    edges = _bin_edges(data)
    parts = [
        pd.DataFrame(
            {"time_s": _middles(edges), **{name: _bin_means(own, own[name], edges) for name in names}, "worker_id": w}
        )
        for w, own in intervals.groupby("worker_id")
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["time_s", *names, "worker_id"])


def worker_utilization(data: RunData) -> pd.DataFrame:
    """Shares of NUM_BINS equal intervals, time_s their middles: prefill_ratio, mixed_ratio, decode_ratio (batches of
    that phase), queued_ratio (work waits, nothing runs), lost_ratio, worker_id. The rest is idle.
    """
    intervals, batches = data.worker_intervals, data.batches
    edges = _bin_edges(data)
    parts = []
    for worker_id, own in intervals.groupby("worker_id"):
        ran = batches[batches["worker_id"] == worker_id]
        shares = {f"{phase}_ratio": _bin_means(ran, ran["batch_phase"] == phase, edges) for phase in PHASES}
        shares |= {f"{state}_ratio": _bin_means(own, own["state"] == state, edges) for state in ("queued", "lost")}
        parts.append(pd.DataFrame({"time_s": _middles(edges), **shares, "worker_id": worker_id}))
    columns = ["time_s", *STATE_RATIOS, "worker_id"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def share_at(cdf: pd.DataFrame, q: float) -> float | None:
    """Where a distribution's curve reaches q; None where it ends below."""
    reached = cdf[cdf["cdf"] >= q - 10.0**-6]
    return float(reached.iloc[:, 1].to_numpy()[0]) if len(reached) else None


def _moments(seconds: pd.Series, data: RunData) -> NDArray[np.float64]:
    return np.sort(seconds.dropna().to_numpy(dtype=np.float64)) - data.window.start_s


def _bin_edges(data: RunData) -> NDArray[np.float64]:
    return np.linspace(0.0, data.window.length_s, NUM_BINS + 1)


def _middles(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    return (edges[1:] + edges[:-1]) / 2


def _bin_means(intervals: pd.DataFrame, values: pd.Series, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Time-weighted means per bin of values that hold during sorted intervals without overlap; 0 between those."""
    if intervals.empty or edges[-1] <= 0:
        return np.zeros(len(edges) - 1)
    starts, ends = intervals["start_time"].to_numpy(), intervals["end_time"].to_numpy()
    areas = np.cumsum(values.to_numpy(dtype=np.float64) * (ends - starts))
    moments = np.column_stack([starts, ends]).ravel()
    cumulated = np.column_stack([np.concatenate([[0.0], areas[:-1]]), areas]).ravel()
    means: NDArray[np.float64] = np.diff(np.interp(edges, moments, cumulated)) / np.diff(edges)
    return means
