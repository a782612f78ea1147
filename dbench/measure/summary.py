"""What a run amounts to, in one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from dbench.measure.intervals import Absence
from dbench.measure.run_data import COMPLETED, UNFINISHED, RunData
from dbench.quantiles import quantile, quantiles

KILLED = "killed"
"""Reason of a run whose file has no last line."""
OPEN = "open"
"""The same of a server's file, of which tables are also made while the server runs."""
AS_PLANNED = frozenset({"complete", "ended"})
"""Reasons of runs and of servers that ended as they should."""

LAG_FLOOR_S = 0.020
LAG_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds, over the requests that have the figure."""

    min: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Score:
    """How many answers were right; a request that failed or never ended counts as a wrong one."""

    num_right: int
    num_asked: int
    accuracy: float
    """Their ratio."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in figures; None where the run has no such figure. Times in seconds, rates per second."""

    seen_from: str
    """client, or server when only the server's events are there."""
    complete: bool
    reason: str
    """complete, timeout, interrupted, server_lost, stopped, or killed: its file has no last line.

    Of a server: ended, failed, or open: it still ran, or was killed.
    """
    detail: str
    valid: bool
    invalid_reason: str
    """Why the figures describe the load generator rather than the server; empty when valid."""
    num_requests: int
    """Measured requests that were drawn."""
    num_sent: int
    num_successful: int
    num_failed: int
    num_unfinished: int
    """Sent, and without an end in the file."""
    latency: Distribution | None
    """request_e2e_time of the successful requests."""
    time_to_first_block: Distribution | None
    lag: Distribution | None
    """request_client_lag of all sent requests; None where the server alone tells of them."""
    wall_clock_time: float | None
    """First intended send to last completion."""
    total_gen_tokens: int
    total_forward_passes: int
    tokens_per_sec: float | None
    """Generated tokens of successful requests over wall_clock_time."""
    requests_per_sec: float | None
    """Successful requests over wall_clock_time."""
    tokens_per_forward_pass: float | None
    offered_qps: float | None
    """inf: all at once; 0: closed loop."""
    sent_qps: float | None
    """Requests per second from the first actual send to the last."""
    achieved_qps: float | None
    """Requests per second that completed: requests_per_sec, beside the rate that was offered."""
    unaccounted_share_p50: float | None
    """Median of request_unaccounted_time / request_e2e_time."""
    num_block_retries: int
    workers: tuple[int, ...]
    workers_used: tuple[int, ...]
    """Workers that decoded a block of a measured request."""
    workers_lost: tuple[Absence, ...]
    """Times count from the first intended send."""
    seed: int | None
    arrivals: str
    lengths: str
    rule: str
    """The unmasking rule and temperature."""
    ignore_eos: bool | None
    num_rounded: int | None
    num_shortened: int | None
    num_repeated: int | None
    """Requests drawn from a row of the trace that an earlier one had used."""
    notes: tuple[str, ...]
    answers: Score | None = None
    """Of all sent requests; None where answers were not checked."""
    answers_by_task: Mapping[str, Score] = field(default_factory=dict)
    """Kind of problem -> the same of its requests; empty where answers were not checked."""


def summarize(data: RunData) -> RunSummary:
    """The figures of a run, or of as much of it as there is."""
    requests = data.requests
    completed = requests[requests["status"] == COMPLETED]
    num_unfinished = int((requests["status"] == UNFINISHED).sum())
    wall = float(completed["done_s"].max()) - data.window.start_s if len(completed) else 0.0
    tokens, passes = int(completed["num_gen_tokens"].sum()), int(completed["num_forward_passes"].sum())
    is_of_server = data.seen_from == "server"
    lag = None if is_of_server else _distribution(requests["request_client_lag"])
    latency = _distribution(completed["request_e2e_time"])
    invalid_reason = _invalid_reason(lag, latency)
    used = data.blocks["worker_id"]
    load, ended = data.load, data.ended
    requests_per_sec = len(completed) / wall if wall > 0 else None
    return RunSummary(
        seen_from=data.seen_from,
        complete=ended is not None and ended.reason in AS_PLANNED,
        reason=ended.reason if ended else OPEN if is_of_server else KILLED,
        detail=ended.detail if ended else "",
        valid=not invalid_reason,
        invalid_reason=invalid_reason,
        num_requests=data.num_requests,
        num_sent=len(requests),
        num_successful=len(completed),
        num_failed=len(requests) - len(completed) - num_unfinished,
        num_unfinished=num_unfinished,
        latency=latency,
        time_to_first_block=_distribution(completed["request_time_to_first_block"]),
        lag=lag,
        wall_clock_time=wall if wall > 0 else None,
        total_gen_tokens=tokens,
        total_forward_passes=passes,
        tokens_per_sec=tokens / wall if wall > 0 else None,
        requests_per_sec=requests_per_sec,
        tokens_per_forward_pass=tokens / passes if passes else None,
        offered_qps=data.offered_qps,
        sent_qps=_rate(requests["sent_s"]),
        achieved_qps=requests_per_sec,
        unaccounted_share_p50=_median(completed["request_unaccounted_time"] / completed["request_e2e_time"]),
        num_block_retries=int(requests["num_block_retries"].sum()),
        workers=data.workers,
        workers_used=tuple(sorted(set(used.tolist()))),
        workers_lost=data.absences,
        seed=load.seed if load else None,
        arrivals=load.arrivals if load else "",
        lengths=load.lengths if load else "",
        rule=load.sampling if load else "",
        ignore_eos=load.ignore_eos if load else None,
        num_rounded=load.num_rounded if load else None,
        num_shortened=load.num_shortened if load else None,
        num_repeated=load.num_repeated if load else None,
        notes=load.notes if load else (),
        answers=_score(requests) if checks_answers(data) else None,
        answers_by_task=_scores_by_task(requests) if checks_answers(data) else {},
    )


def checks_answers(data: RunData) -> bool:
    """Whether the run compared what it got with what is right."""
    return data.load is not None and data.load.checks_answers and len(data.requests) > 0


def _scores_by_task(requests: pd.DataFrame) -> dict[str, Score]:
    return {str(task): _score(rows) for task, rows in requests.groupby("task", sort=True)}


def _score(requests: pd.DataFrame) -> Score:
    num_right, num_asked = int(requests["answer_is_right"].sum()), len(requests)
    return Score(num_right, num_asked, num_right / num_asked)


def lag_limit(median_latency: float | None) -> float:
    """The p99 send lag above which a run is invalid, in seconds."""
    return max(LAG_FLOOR_S, LAG_SHARE * (median_latency or 0.0))


def _invalid_reason(lag: Distribution | None, latency: Distribution | None) -> str:
    limit = lag_limit(latency.p50 if latency else None)
    if lag is None or lag.p99 <= limit:
        return ""
    return (
        f"the load generator fell behind: p99 send lag {lag.p99 * 1e3:.1f} ms, limit {limit * 1e3:.1f} ms; "
        "give it more CPU, or send from another machine"
    )


def _distribution(values: pd.Series) -> Distribution | None:
    known = values.dropna().to_numpy(dtype=np.float64)
    if known.size == 0:
        return None
    p50, p90, p99 = quantiles(known, (0.5, 0.9, 0.99))
    return Distribution(float(known.min()), float(known.mean()), p50, p90, p99, float(known.max()))


def _median(values: pd.Series) -> float | None:
    known = values.dropna()
    return quantile(known, 0.5) if len(known) else None


def _rate(moments: pd.Series) -> float | None:
    span = float(moments.max() - moments.min()) if len(moments) else 0.0
    return (len(moments) - 1) / span if span > 0 else None
