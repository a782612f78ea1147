"""SLA rules: the grammar, and the judgement of one finished trial.

    METRIC:pNN[.N]OP VALUE[ms|s]    request_e2e_time:p90<=8s
    METRIC:mean OP VALUE[ms|s]      request_time_to_first_block:mean<500ms
    error_rate|goodput|accuracy OP VALUE     error_rate<=0.01

OP is one of <= < >= > ==. A time without a unit is in seconds.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from dbench.errors import SlaError, unknown_name
from dbench.metric_names import DEPTH_METRICS, REQUEST_METRICS, SLA_METRICS

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}

UNITS = {"s": 1.0, "ms": 0.001}

ACCURACY = "accuracy"

PLAIN_METRICS = ("error_rate", "goodput", ACCURACY)
"""One number per trial, without a quantile."""

RULE_KEYS = ("metric", "quantile", "threshold", "op")
"""Of a rule in YAML."""

EXAMPLE = "METRIC:pNN<=VALUE[ms|s], METRIC:mean<=VALUE or error_rate<=VALUE, such as 'request_e2e_time:p90<=8s'"

JUDGED_PER_TAIL = 10
"""A quantile q rests on fewer than this many requests beyond it below 10/(1-q) judged requests."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One limit that a trial must keep."""

    metric: str
    quantile: float | None
    """In (0, 1); None: the mean of a metric, or a metric of PLAIN_METRICS."""
    op: str
    threshold: float
    """Seconds for times, else the metric's own unit."""

    @property
    def unit(self) -> str:
        """'s' for a time, else nothing."""
        return "s" if is_time(self.metric) else ""

    @property
    def aggregate(self) -> str:
        """'p90', 'mean', or nothing for a metric of PLAIN_METRICS."""
        if self.metric in PLAIN_METRICS:
            return ""
        return "mean" if self.quantile is None else f"p{100 * self.quantile:.10g}"

    @property
    def subject(self) -> str:
        """What is measured: 'request_e2e_time:p90'."""
        return f"{self.metric}:{self.aggregate}" if self.aggregate else self.metric

    @property
    def text(self) -> str:
        """The rule in one spelling, whatever was written."""
        return f"{self.subject}{self.op}{self.threshold:.12g}{self.unit}"

    @property
    def wants_less(self) -> bool:
        return self.op in ("<=", "<")

    @property
    def failure(self) -> float:
        """What a request that did not complete counts as: the worst that this rule can see."""
        return math.inf if self.wants_less or self.op == "==" else -math.inf

    def holds(self, value: float) -> bool:
        return OPERATORS[self.op](value, self.threshold)

    def margin(self, value: float) -> float:
        """How far the value is on the good side of the limit, as a share of the limit; absolute where that is 0."""
        distance = self.threshold - value if self.wants_less else value - self.threshold
        if self.op == "==":
            distance = -abs(distance)
        return distance / self.threshold if self.threshold else distance


IMPLICIT_ERROR_RULE = Rule("error_rate", None, "<=", 0.01)
"""Holds for every SLA that says nothing about errors."""


class Measurements(Protocol):
    """What a finished trial offers to its rules: figures over the judged requests."""

    @property
    def num_judged(self) -> int:
        """Requests that count."""

    def quantile(self, metric: str, q: float, failure: float) -> float:
        """The ceil(qN)-th smallest, failed requests as `failure`; time-weighted for DEPTH_METRICS."""

    def mean(self, metric: str, failure: float) -> float:
        """Infinite if a request failed; time-weighted for DEPTH_METRICS."""

    def error_rate(self) -> float:
        """Share of the judged requests that did not complete."""

    def accuracy(self) -> float:
        """Share of the judged requests with the right answer; raises RunError where answers were not checked."""

    def goodput(self, rules: Sequence[Rule]) -> float:
        """Completed requests per second that each keep every one of `rules`."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """One rule on one trial."""

    rule: Rule
    value: float
    passed: bool
    margin: float
    note: str
    """Something that the reader of the value must know; usually empty."""


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """The rules of repeated --sla, each once, with the implicit error rate; none for no text."""
    return completed(parse_rule(text) for text in texts)


def completed(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules, each once, and IMPLICIT_ERROR_RULE unless one of them is about errors or there are none."""
    given = tuple(dict.fromkeys(rules))
    if not given or any(rule.metric == IMPLICIT_ERROR_RULE.metric for rule in given):
        return given
    return (*given, IMPLICIT_ERROR_RULE)


def parse_rule(text: str, source: str = "--sla") -> Rule:
    """The rule that `text` says. Raises SlaError naming `source` and the text."""
    where = f"{source} {text!r}"
    parts = re.fullmatch(r"([^<>=!]*)([<>=!]+)([^<>=!]*)", text)
    if parts is None:
        raise SlaError(f"{where}: no operator; wanted {EXAMPLE}")
    subject, op, value = (part.strip() for part in parts.groups())
    metric, colon, aggregate = (part.strip() for part in subject.partition(":"))
    if colon and not aggregate:
        raise SlaError(f"{where}: nothing after the colon; wanted {EXAMPLE}")
    _check_metric(metric, where)
    quantile = _read_aggregate(metric, aggregate, where)
    return Rule(metric, quantile, _read_op(op, where), _read_threshold(metric, value, where))


def rule_from_mapping(mapping: Mapping[str, object], where: str) -> Rule:
    """The rule of a YAML mapping with RULE_KEYS; `op` may be left out for <=. Raises SlaError naming `where`."""
    for key in mapping:
        if key not in RULE_KEYS:
            raise SlaError(f"{where}: {unknown_name('key', str(key), RULE_KEYS)}")
    for key in ("metric", "threshold"):
        if key not in mapping:
            raise SlaError(f"{where}: no {key}; a rule has metric, quantile, threshold and op")
    metric = str(mapping["metric"])
    _check_metric(metric, where)
    quantile = _read_yaml_quantile(metric, mapping.get("quantile"), where)
    op = _read_op(str(mapping.get("op", "<=")), where)
    return Rule(metric, quantile, op, _read_threshold(metric, str(mapping["threshold"]), where))


def known_metrics() -> tuple[str, ...]:
    """Every name that a rule may be about."""
    return (*SLA_METRICS, *PLAIN_METRICS)


def is_time(metric: str) -> bool:
    """Whether the metric is in seconds, or in seconds per token."""
    return metric in REQUEST_METRICS and REQUEST_METRICS[metric].unit in ("s", "s/token")


def evaluate(rules: Sequence[Rule], measured: Measurements) -> tuple[RuleResult, ...]:
    """Every rule on one trial, in their order."""
    return tuple(_evaluate_one(rule, rules, measured) for rule in rules)


def _evaluate_one(rule: Rule, rules: Sequence[Rule], measured: Measurements) -> RuleResult:
    if rule.metric == "error_rate":
        value = measured.error_rate()
    elif rule.metric == ACCURACY:
        value = measured.accuracy()
    elif rule.metric == "goodput":
        value = measured.goodput([r for r in rules if r.metric in REQUEST_METRICS])
    elif rule.quantile is None:
        value = measured.mean(rule.metric, rule.failure)
    else:
        value = measured.quantile(rule.metric, rule.quantile, rule.failure)
    return RuleResult(rule, value, rule.holds(value), rule.margin(value), _note(rule, measured.num_judged))


def _note(rule: Rule, num_judged: int) -> str:
    if rule.quantile is None or rule.metric in DEPTH_METRICS:
        return ""
    wanted = math.ceil(JUDGED_PER_TAIL / (1 - rule.quantile) - 1e-6)
    if num_judged >= wanted:
        return ""
    return f"{rule.aggregate} rests on {num_judged} judged requests; {wanted} or more make it reliable"


def _check_metric(metric: str, where: str) -> None:
    if not metric:
        raise SlaError(f"{where}: no metric; wanted {EXAMPLE}")
    if metric not in known_metrics():
        raise SlaError(f"{where}: {unknown_name('metric', metric, known_metrics())}")


def _read_aggregate(metric: str, aggregate: str, where: str) -> float | None:
    if metric in PLAIN_METRICS:
        if aggregate:
            raise SlaError(f"{where}: {metric} is one number per trial; leave out ':{aggregate}'")
        return None
    if aggregate == "mean":
        return None
    match = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)", aggregate)
    quantile = float(Decimal(match[1]) / 100) if match else 0.0
    if not 0 < quantile < 1:
        got = repr(aggregate) if aggregate else "nothing"
        raise SlaError(f"{where}: got {got} of {metric}, wanted a quantile between p0 and p100, or mean; {EXAMPLE}")
    return quantile


def _read_yaml_quantile(metric: str, quantile: object, where: str) -> float | None:
    if quantile is None or isinstance(quantile, str):
        return _read_aggregate(metric, quantile or "", where)
    if metric in PLAIN_METRICS:
        raise SlaError(f"{where}: {metric} is one number per trial; leave out its quantile")
    if isinstance(quantile, bool) or not isinstance(quantile, int | float) or not 0 < quantile < 1:
        raise SlaError(f"{where}: got quantile {quantile!r}, wanted a number between 0 and 1, such as 0.9, or mean")
    return float(quantile)


def _read_op(op: str, where: str) -> str:
    if op not in OPERATORS:
        raise SlaError(f"{where}: unknown operator {op!r} (known: {' '.join(OPERATORS)})")
    return op


def _read_threshold(metric: str, text: str, where: str) -> float:
    match = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*([a-zA-Zµ%]*)\s*", text)
    number = _number(match[1]) if match else None
    if match is None or number is None or not math.isfinite(number) or number < 0:
        raise SlaError(f"{where}: got the limit {text!r}, wanted a number of at least 0; {EXAMPLE}")
    unit = match[2]
    if unit and not is_time(metric):
        raise SlaError(f"{where}: {metric} is no time; leave out {unit!r}")
    if unit and unit not in UNITS:
        raise SlaError(f"{where}: unknown unit {unit!r} (known: {', '.join(UNITS)}); {EXAMPLE}")
    scale = UNITS[unit or "s"] if is_time(metric) else 1.0
    return float(Decimal(match[1]) * Decimal(str(scale)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
