"""What one finished trial is worth: pass, fail or invalid, from the events in its folder.

A trial that was stopped early because a rule was lost is judged by what its values are at least: a request that
was still in the system was at least as slow as it was old, and nothing is known of those that were never sent.
"""

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
from dbench.metrics import (
    RunData,
    accuracy,
    error_rate,
    goodput,
    judged_mean,
    judged_quantile,
    judged_requests,
    lag_limit,
    num_unjudged,
)
from dbench.metrics import quantile as quantile_of
from dbench.progress import Verdict
from dbench.search.sla import ACCURACY, Rule, RuleResult, evaluate, is_time
from dbench.search.statistics import RISE_LIMIT, growth, is_lost
from dbench.serve.sequence import Status

if TYPE_CHECKING:
    import pandas as pd

STOPPED_NOTE = "a trial that was stopped early shows what its value is at least"


class TrialEnd(StrEnum):
    """How the run of a trial ended."""

    COMPLETE = "complete"
    TIMEOUT = "timeout"
    STOPPED = "stopped"
    """A rule was lost for certain before the last request had ended."""
    CRASHED = "crashed"
    """The server or one of its workers went away under load, twice."""


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

    def accuracy(self) -> float:
        return accuracy(self.data)

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
    if end is TrialEnd.STOPPED:
        lost = _lost_for_certain(rules, data)
        if late:
            return Judgement(Verdict.INVALID, late, lost)
        if not lost:
            return Judgement(Verdict.UNDECIDED, f"undecided: stopped early, {detail}")
        return Judgement(Verdict.FAIL, f"stopped early: {_all_broken(lost, '>=')}", lost, _hopeless(rules, data))
    if late:
        return Judgement(Verdict.INVALID, late, _evaluate_what_is_known(rules, data))
    if not rules:
        return Judgement(Verdict.UNJUDGED, "")
    results = evaluate(rules, RunMeasurements(data))
    against = "; ".join(filter(None, (_all_broken(results), *_growth_reasons(rules, data))))
    if not against:
        return Judgement(Verdict.PASS, "", results)
    return Judgement(Verdict.FAIL, against, results, _hopeless(rules, data))


def lag_reason(data: RunData, rules: Sequence[Rule]) -> str:
    """Why the trial says more about the load generator than about the server; empty when it does not.

    The limit on the p99 send lag is a share of the tightest limit in seconds, for that is what the lag blurs;
    without one, of the median latency; and never below the floor of `lag_limit`.
    """
    lags = data.requests["request_client_lag"].dropna().to_numpy(dtype=np.float64)
    if lags.size == 0:
        return ""
    times = [r.threshold for r in rules if r.metric in REQUEST_METRICS and REQUEST_METRICS[r.metric].unit == "s"]
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


def _growth_reasons(rules: Sequence[Rule], data: RunData) -> list[str]:
    """One line per upper limit on a time whose metric grows so much that a longer trial would break it."""
    judged = judged_requests(data)
    reasons = []
    for rule in rules:
        if not is_time(rule.metric) or not rule.wants_less:
            continue
        found = growth(judged["intended_s"], judged[rule.metric])
        if found is not None and found.breaks(rule.threshold):
            reasons.append(
                f"latency grows through the trial: {rule.metric} by {found.rise:.4g}{rule.unit} from its first judged "
                f"request to its last, allowed {RISE_LIMIT * rule.threshold:.4g}{rule.unit} for {rule.text}"
            )
    return reasons


def _lost_for_certain(rules: Sequence[Rule], data: RunData) -> tuple[RuleResult, ...]:
    """The rules that the part of a trial which was run already breaks, each with what its value is at least."""
    results = []
    for rule in rules:
        value = _least_value(rule, data)
        if value is not None and not rule.holds(value):
            results.append(RuleResult(rule, value, False, rule.margin(value), STOPPED_NOTE))
    return tuple(results)


def _least_value(rule: Rule, data: RunData) -> float | None:
    """What the rule's value will be at least when the trial is over; None where that is not known."""
    count = _num_judged(data)
    if rule.wants_less and rule.metric == "error_rate":
        return int((judged_requests(data)["status"] == Status.ERROR).sum()) / count
    if not _is_limit_on_request_time(rule) or rule.quantile is None:
        return None
    seen = _least_times(rule.metric, data)
    return quantile_of(np.concatenate([seen, np.full(count - seen.size, -math.inf)]), rule.quantile)


def _least_times(metric: str, data: RunData) -> NDArray[np.float64]:
    """Per judged request that was sent what its time is at least: inf for one that the server failed, -inf where
    nothing is known."""
    judged = judged_requests(data)
    known = judged[metric].where(judged["status"] == Status.COMPLETED)
    if metric == "request_e2e_time":
        known = known.fillna(judged["done_s"].fillna(data.window.end_s) - judged["intended_s"])
    times = known.fillna(-math.inf).mask(judged["status"] == Status.ERROR, math.inf)
    return times.to_numpy(dtype=np.float64)


def _num_judged(data: RunData) -> int:
    """Judged requests of the whole trial, those that were never sent included."""
    return data.num_requests - num_unjudged(data.num_requests)


def _is_limit_on_request_time(rule: Rule) -> bool:
    """An upper limit on a time that each request has one of."""
    return rule.wants_less and is_time(rule.metric) and not REQUEST_METRICS[rule.metric].is_distribution


def _all_broken(results: Sequence[RuleResult], sign: str = "=") -> str:
    return "; ".join(_broken(result, sign) for result in results if not result.passed)


def _broken(result: RuleResult, sign: str) -> str:
    rule = result.rule
    wanted = f"wanted {rule.op}{rule.threshold:g}{rule.unit}"
    if math.isinf(result.value):
        return f"{rule.subject} not reached: too many requests failed, {wanted}"
    return f"{rule.subject} {sign} {result.value:.4g}{rule.unit}, {wanted}"


def _keeps_all(rows: pd.DataFrame, rules: Sequence[Rule]) -> pd.Series[bool]:
    kept = rows["request_e2e_time"].notna()
    for rule in rules:
        kept &= rows[rule.metric].map(rule.holds)
    return kept


def _hopeless(rules: Sequence[Rule], data: RunData) -> bool:
    """Whether a rule is lost by wrong answers, or by the requests that met no other request in the system.

    All trials send the same requests, and at a lower rate these are still alone, so they stay as slow. A failed
    request says nothing of that kind: the next trial may see none.
    """
    judged = judged_requests(data)
    if judged.empty:
        return False
    alone = was_alone(data.requests, all_sent=len(data.requests) == data.num_requests)[judged.index.to_numpy()]
    alone &= (judged["status"] != Status.ERROR).to_numpy()
    return any(_lost_alone(rule, alone, data) for rule in rules)


def was_alone(requests: pd.DataFrame, *, all_sent: bool) -> NDArray[np.bool_]:
    """Per row of the request frame: no other request was in the system with it.

    Never so for the last one where all were sent: an unmeasured request may have followed it.
    """
    starts = requests["intended_s"].to_numpy(dtype=np.float64)
    ends = requests["done_s"].fillna(math.inf).to_numpy(dtype=np.float64)
    busy_until = np.concatenate([[-math.inf], np.maximum.accumulate(ends)[:-1]])
    following = np.concatenate([starts[1:], [-math.inf if all_sent else math.inf]])
    return (starts >= busy_until) & (ends <= following)


def _lost_alone(rule: Rule, alone: NDArray[np.bool_], data: RunData) -> bool:
    if rule.metric == "goodput":
        qps = data.offered_qps
        return rule.op in (">=", ">") and qps is not None and 0 < qps <= rule.threshold
    if rule.metric == ACCURACY:
        return rule.op in (">=", ">") and not rule.holds(1 - _num_wrong(data) / _num_judged(data))
    if not _is_limit_on_request_time(rule):
        return False
    times = _least_times(rule.metric, data)[alone]
    if rule.quantile is None:
        return not rule.holds(float(times[np.isfinite(times)].sum()) / _num_judged(data))
    return is_lost(rule, _num_judged(data), times)


def _num_wrong(data: RunData) -> int:
    """Judged requests that completed with a wrong answer: what a request is answered does not depend on the rate."""
    judged = judged_requests(data)
    return int((~judged["answer_is_right"].fillna(True) & (judged["status"] == Status.COMPLETED)).sum())
