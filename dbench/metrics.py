"""Events -> tables -> summary and SLA figures: the front door to everything that is computed from a run.

    data = load_run(run_dir)
    request_table(data), block_table(data), batch_table(data), worker_timeline(data), worker_summary(data)
    summarize(data)                                    what a run reports
    judged_quantile(data, "request_e2e_time", 0.9)     what an SLA rule is judged on

Only measured requests count. The judged ones are those after the first `warmup_share` of them, in the order
of their intended sends; one that failed, was cancelled or never ended has the value `failure`: +inf, and -inf
where a rule asks for large values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dbench.errors import RunError, SlaError, unknown_name
from dbench.measure.blocks import block_times
from dbench.measure.run_data import COMPLETED, RunData, load_run
from dbench.measure.summary import Distribution, RunSummary, Score, checks_answers, lag_limit, summarize
from dbench.measure.workers import (
    scheduler_mean,
    scheduler_quantile,
    worker_summary,
    worker_timeline,
    worst_depth_mean,
    worst_depth_quantile,
)
from dbench.metric_names import (
    BATCH_METRICS,
    BLOCK_METRICS,
    DEPTH_METRICS,
    REQUEST_METRICS,
    SLA_METRICS,
    WORKER_METRICS,
)
from dbench.quantiles import quantile, quantiles, time_weighted_mean, time_weighted_quantile

__all__ = [
    "BATCH_METRICS",
    "BLOCK_METRICS",
    "DEPTH_METRICS",
    "REQUEST_METRICS",
    "SLA_METRICS",
    "WORKER_METRICS",
    "Distribution",
    "RunData",
    "RunSummary",
    "Score",
    "accuracy",
    "batch_table",
    "block_table",
    "error_rate",
    "goodput",
    "judged_mean",
    "judged_quantile",
    "judged_requests",
    "judged_window",
    "lag_limit",
    "load_run",
    "metric_values",
    "num_unjudged",
    "quantile",
    "quantiles",
    "request_table",
    "summarize",
    "time_weighted_mean",
    "time_weighted_quantile",
    "worker_summary",
    "worker_timeline",
]

WARMUP_SHARE = 0.2

_ROUNDING = 1e-9

_COUNTS = tuple(n for n, m in REQUEST_METRICS.items() if m.unit in ("1", "tokens") and not m.is_distribution)


def request_table(data: RunData) -> pd.DataFrame:
    """One row per measured request: what it is, when it was (seconds from t = 0), and every request metric."""
    raw = data.requests
    return pd.DataFrame(
        {
            "request_id": raw["request_id"],
            "index": raw["index"],
            "status": raw["status"],
            "error": raw["error"],
            "task": raw["task"],
            "answer_is_right": raw["answer_is_right"],
            "intended_time": raw["intended_s"] - data.window.start_s,
            "completion_time": raw["done_s"] - data.window.start_s,
            "num_block_retries": raw["num_block_retries"],
            **{name: _counts(raw[name]) if name in _COUNTS else raw[name] for name in REQUEST_METRICS},
        }
    )


def block_table(data: RunData) -> pd.DataFrame:
    """One row per block of a measured request, its last attempt."""
    blocks = data.blocks
    names = blocks["request_id"].astype(str) + "_b" + blocks["block_index"].astype(str)
    return pd.DataFrame(
        {
            "block_id": names.astype(object),
            "request_id": blocks["request_id"],
            "block_index": blocks["block_index"],
            "worker_id": blocks["worker_id"],
            "prefill_worker_id": blocks["prefill_worker_id"],
            "outcome": blocks["outcome"],
            "end_time": blocks["finished_s"] - data.window.start_s,
            **block_times(blocks),
            "block_num_forward_passes": blocks["num_passes"],
            "block_num_tokens": blocks["num_tokens"],
            "block_num_attempts": blocks["num_attempts"],
        }
    )


def batch_table(data: RunData) -> pd.DataFrame:
    """One row per batch that ran in the window, by worker and time."""
    return data.batches


def judged_requests(data: RunData, warmup_share: float = WARMUP_SHARE) -> pd.DataFrame:
    """The rows of the request frame that verdicts rest on, in intended order.

    The warm-up is a share of the requests that were drawn, so a run that was cut short judges the same ones.
    """
    return data.requests.iloc[num_unjudged(data.num_requests, warmup_share) :]


def num_unjudged(num_requests: int, warmup_share: float = WARMUP_SHARE) -> int:
    """How many of the first requests of a run warm it up."""
    return math.floor(warmup_share * num_requests + _ROUNDING)


def judged_window(data: RunData, warmup_share: float = WARMUP_SHARE) -> tuple[float, float]:
    """From the first judged request's intended send to the last one's end, in seconds from t = 0.

    Raises RunError when no request is judged.
    """
    judged = judged_requests(data, warmup_share)
    if judged.empty:
        raise RunError(f"{data.run_dir}: no request was sent after the warm-up of {warmup_share:.0%}; nothing to judge")
    ends = judged["done_s"]
    end_s = float(ends.max()) if bool(ends.notna().all()) else data.window.end_s
    return float(judged["intended_s"].iloc[0]) - data.window.start_s, end_s - data.window.start_s


def metric_values(
    data: RunData, name: str, warmup_share: float = WARMUP_SHARE, failure: float = math.inf
) -> NDArray[np.float64]:
    """All values of a request metric over the judged requests, in intended order.

    A failed request counts with one `failure`, in a distribution with one per token that it asked for.
    Raises SlaError for an unknown name, RunError when a completed request lacks the figure.
    """
    if name not in REQUEST_METRICS:
        raise SlaError(unknown_name("request metric", name, REQUEST_METRICS))
    judged = judged_requests(data, warmup_share)
    completed = judged["status"] == COMPLETED
    is_distribution = REQUEST_METRICS[name].is_distribution
    missing = int(judged.loc[completed, "num_blocks" if is_distribution else name].isna().sum())
    if missing:
        raise RunError(
            f"{data.run_dir}: {name} is unknown for {missing} completed requests; the server's events are not all here"
        )
    if not is_distribution:
        return judged[name].where(completed, failure).to_numpy(dtype=np.float64)
    known = data.steps.by_metric[name].of_rows(judged.index[completed].to_numpy(dtype=np.int64))
    return np.concatenate([known, np.full(int(judged.loc[~completed, "gen_length"].sum()), failure)])


def judged_quantile(
    data: RunData, metric: str, q: float, warmup_share: float = WARMUP_SHARE, failure: float = math.inf
) -> float:
    """The q-quantile that a rule on `metric` compares; depths are weighted by time, over the judged window.

    Raises SlaError for an unknown metric, RunError when there is nothing to judge.
    """
    if metric not in DEPTH_METRICS:
        return quantile(_some(data, metric, warmup_share, failure), q)
    start, end = judged_window(data, warmup_share)
    if metric == "queue_depth_waiting":
        return _known(data, metric, worst_depth_quantile(data, q, start, end))
    return _known(data, metric, scheduler_quantile(data, metric, q, start, end))


def judged_mean(data: RunData, metric: str, warmup_share: float = WARMUP_SHARE, failure: float = math.inf) -> float:
    """The mean that a rule on `metric` compares; one failed request makes it infinite."""
    if metric not in DEPTH_METRICS:
        return float(_some(data, metric, warmup_share, failure).mean())
    start, end = judged_window(data, warmup_share)
    if metric == "queue_depth_waiting":
        return _known(data, metric, worst_depth_mean(data, start, end))
    return _known(data, metric, scheduler_mean(data, metric, start, end))


def error_rate(data: RunData, warmup_share: float = WARMUP_SHARE) -> float:
    """The share of judged requests that did not complete."""
    judged_window(data, warmup_share)
    return float((judged_requests(data, warmup_share)["status"] != COMPLETED).mean())


def accuracy(data: RunData, warmup_share: float = WARMUP_SHARE) -> float:
    """The share of judged requests whose answer is right; one that did not complete has a wrong answer.

    Raises RunError for a run that did not check its answers.
    """
    judged_window(data, warmup_share)
    if not checks_answers(data):
        raise RunError(f"{data.run_dir}: accuracy is unknown, the run did not check answers; add --check-answers")
    judged = judged_requests(data, warmup_share)
    return int(judged["answer_is_right"].sum()) / len(judged)


def goodput(
    data: RunData, predicate: Callable[[pd.DataFrame], pd.Series[bool]], warmup_share: float = WARMUP_SHARE
) -> float:
    """Judged requests per second of the judged window that completed and satisfy `predicate`.

    `predicate` gets their rows, one column per request metric (a distribution's mean), and answers per row.
    """
    start, end = judged_window(data, warmup_share)
    judged = judged_requests(data, warmup_share)
    completed = judged[judged["status"] == COMPLETED]
    return float(predicate(completed).sum()) / (end - start) if end > start else 0.0


def _counts(values: pd.Series) -> pd.Series:
    """Whole numbers, or missing."""
    return values.astype("Int64")


def _some(data: RunData, metric: str, warmup_share: float, failure: float) -> NDArray[np.float64]:
    if metric not in REQUEST_METRICS:
        raise SlaError(unknown_name("metric", metric, SLA_METRICS))
    values = metric_values(data, metric, warmup_share, failure)
    if values.size == 0:
        raise RunError(f"{data.run_dir}: no value of {metric} after the warm-up of {warmup_share:.0%} to judge")
    return values


def _known(data: RunData, metric: str, value: float | None) -> float:
    if value is None:
        raise RunError(f"{data.run_dir}: {metric} is unknown; the server's events are not all here")
    return value
