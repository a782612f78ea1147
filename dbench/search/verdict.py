"""What one finished trial is worth: pass, fail or invalid, from the events in its folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dbench.errors import RunError
from dbench.metric_names import REQUEST_METRICS
from dbench.metrics import RunData, error_rate, goodput, judged_mean, judged_quantile, judged_requests, lag_limit
from dbench.metrics import quantile as quantile_of
from dbench.progress import Verdict
from dbench.search.sla import Rule, RuleResult, evaluate, is_time
from dbench.search.statistics import is_lost

if TYPE_CHECKING:
    import pandas as pd


class TrialEnd(StrEnum):
    """How the run of a trial ended."""

    COMPLETE = "complete"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The server went away under load, twice."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a trial and what it rests on."""

    verdict: Verdict
    reason: str
    """Why it is no pass; empty for a pass."""
    rules: tuple[RuleResult, ...] = ()
    hopeless: bool = False
    """A fail that no lower rate can turn into a pass."""


@dataclass(frozen=True, slots=True)
class RunMeasurements:
    """The figures of a run that its rules ask for."""

    data: RunData

    @property
    def num_judged(self) -> int:
        return len(judged_requests(self.data))

    def quantile(self, metric: str, q: float, failure: float) -> float:
        return judged_quantile(self.data, metric, q, failure=failure)

    def mean(self, metric: str, failure: float) -> float:
        return judged_mean(self.data, metric, failure=failure)

    def error_rate(self) -> float:
        return error_rate(self.data)

    def goodput(self, rules: Sequence[Rule]) -> float:
        return goodput(self.data, lambda rows: _keeps_all(rows, rules))


def judge(end: TrialEnd, detail: str, data: RunData, rules: Sequence[Rule]) -> Judgement:
    """The verdict on a trial that ended as `end`; `detail` is the one line that came with it.

    Raises RunError when a rule's figure is unknown although the trial is complete.
    """
    if end is TrialEnd.CRASHED:
        return Judgement(Verdict.FAIL if rules else Verdict.UNJUDGED, f"crash: {detail}")
    if end is TrialEnd.TIMEOUT:
        verdict = Verdict.FAIL if rules else Verdict.UNJUDGED
        return Judgement(verdict, f"timeout: {detail}", _evaluate_what_is_known(rules, data), _hopeless(rules, data))
    late = lag_reason(data, rules)
    if late:
        return Judgement(Verdict.INVALID, late, _evaluate_what_is_known(rules, data))
    if not rules:
        return Judgement(Verdict.UNJUDGED, "")
    results = evaluate(rules, RunMeasurements(data))
    if all(r.passed for r in results):
        return Judgement(Verdict.PASS, "", results)
    return Judgement(
        Verdict.FAIL, "; ".join(_broken(r) for r in results if not r.passed), results, _hopeless(rules, data)
    )


def lag_reason(data: RunData, rules: Sequence[Rule]) -> str:
    """Why the trial says more about the load generator than about the server; empty when it does not.

    The limit on the p99 send lag is a share of the tightest limit on a time, for that is what the lag blurs;
    without one, of the median latency.
    """
    lags = data.requests["request_client_lag"].dropna().to_numpy(dtype=np.float64)
    if lags.size == 0:
        return ""
    times = [r.threshold for r in rules if r.metric == "request_e2e_time" or r.metric == "request_time_to_first_block"]
    latencies = data.requests["request_e2e_time"].dropna().to_numpy(dtype=np.float64)
    scale = min(times) if times else quantile_of(latencies, 0.5) if latencies.size else None
    lag, limit = quantile_of(lags, 0.99), lag_limit(scale)
    if lag <= limit:
        return ""
    return f"invalid: the load generator's p99 send lag was {lag * 1e3:.1f} ms, the limit is {limit * 1e3:.1f} ms"


def _evaluate_what_is_known(rules: Sequence[Rule], data: RunData) -> tuple[RuleResult, ...]:
    """The rules of a trial whose verdict does not rest on them; none where a figure is unknown."""
    try:
        return evaluate(rules, RunMeasurements(data))
    except RunError:
        return ()


def _broken(result: RuleResult) -> str:
    rule = result.rule
    return f"{rule.subject} = {result.value:.4g}{rule.unit}, wanted {rule.op}{rule.threshold:g}{rule.unit}"


def _keeps_all(rows: pd.DataFrame, rules: Sequence[Rule]) -> pd.Series[bool]:
    kept = rows["request_e2e_time"].notna()
    for rule in rules:
        kept &= rows[rule.metric].map(rule.holds)
    return kept


def _hopeless(rules: Sequence[Rule], data: RunData) -> bool:
    """Whether a rule is lost by the requests that met no other request in the system.

    All trials send the same requests, and at a lower rate these are still alone, so they stay as slow.
    """
    judged = judged_requests(data)
    if judged.empty:
        return False
    alone = was_alone(data.requests)[judged.index.to_numpy()]
    return any(_lost_alone(rule, judged, alone, data.offered_qps) for rule in rules)


def was_alone(requests: pd.DataFrame) -> NDArray[np.bool_]:
    """Per row of the request frame: no other request was in the system with it.

    Never so for the last one: an unmeasured request may have followed it.
    """
    starts = requests["intended_s"].to_numpy(dtype=np.float64)
    ends = requests["done_s"].fillna(math.inf).to_numpy(dtype=np.float64)
    busy_until = np.concatenate([[-math.inf], np.maximum.accumulate(ends)[:-1]])
    following = np.concatenate([starts[1:], [-math.inf]])
    return (starts >= busy_until) & (ends <= following)


def _lost_alone(rule: Rule, judged: pd.DataFrame, alone: NDArray[np.bool_], qps: float | None) -> bool:
    count = len(judged)
    if rule.metric == "goodput":
        return rule.op in (">=", ">") and qps is not None and 0 < qps <= rule.threshold
    if not rule.wants_less:
        return False
    failed = (judged["status"] != "COMPLETED").to_numpy()
    if rule.metric == "error_rate":
        return not rule.holds(float((alone & failed).sum()) / count)
    if not is_time(rule.metric) or REQUEST_METRICS[rule.metric].is_distribution:
        return False
    values = np.where(failed, rule.failure, judged[rule.metric].to_numpy(dtype=np.float64))
    if rule.quantile is None:
        return not rule.holds(float(values[alone].sum()) / count)
    return is_lost(rule, count, values[alone])
