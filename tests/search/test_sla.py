"""The grammar of SLA rules and the judgement of a trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import SlaError
from dbench.quantiles import quantile
from dbench.search.sla import (
    IMPLICIT_ERROR_RULE,
    OPERATORS,
    PLAIN_METRICS,
    Rule,
    evaluate,
    known_metrics,
    parse_rule,
    parse_rules,
    rule_from_mapping,
)


@dataclass
class Figures:
    """A trial whose judged requests took `latencies`, inf for a failed one."""

    latencies: list[float] = field(default_factory=lambda: [1.0] * 100)
    good: float = 3.0
    rules_of_goodput: list[Rule] = field(default_factory=list)

    @property
    def num_judged(self) -> int:
        return len(self.latencies)

    def seen(self, failure: float) -> list[float]:
        return [failure if math.isinf(v) else v for v in self.latencies]

    def quantile(self, metric: str, q: float, failure: float) -> float:
        return quantile(self.seen(failure), q)

    def mean(self, metric: str, failure: float) -> float:
        return sum(self.seen(failure)) / len(self.latencies)

    def accuracy(self) -> float:
        return 0.75

    def error_rate(self) -> float:
        return sum(math.isinf(v) for v in self.latencies) / len(self.latencies)

    def goodput(self, rules: Sequence[Rule]) -> float:
        self.rules_of_goodput.extend(rules)
        return self.good


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("request_e2e_time:p90<=8s", Rule("request_e2e_time", 0.9, "<=", 8.0)),
        ("request_e2e_time:p90<=8", Rule("request_e2e_time", 0.9, "<=", 8.0)),
        (" request_e2e_time : p99.9 < 250ms ", Rule("request_e2e_time", 0.999, "<", 0.25)),
        ("request_time_to_first_block:mean<=1.5s", Rule("request_time_to_first_block", None, "<=", 1.5)),
        ("request_e2e_time_normalized:p50<=20ms", Rule("request_e2e_time_normalized", 0.5, "<=", 0.02)),
        ("request_num_forward_passes:p50==12", Rule("request_num_forward_passes", 0.5, "==", 12.0)),
        ("queue_depth_waiting:p95<=4", Rule("queue_depth_waiting", 0.95, "<=", 4.0)),
        ("scheduler_pending_requests:mean<2", Rule("scheduler_pending_requests", None, "<", 2.0)),
        ("error_rate<=0.05", Rule("error_rate", None, "<=", 0.05)),
        ("goodput>=1.5", Rule("goodput", None, ">=", 1.5)),
        ("request_e2e_time:p07<=1e1s", Rule("request_e2e_time", 0.07, "<=", 10.0)),
    ],
)
def test_a_rule_is_read(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("request_e2e_tim:p90<=8s", "did you mean 'request_e2e_time'?"),
        ("request_e2e_time:p90", "no operator"),
        ("request_e2e_time:p90<=8<=9", "no operator"),
        ("request_e2e_time:p90=8s", "unknown operator '='"),
        ("request_e2e_time:p90!=8s", "unknown operator '!='"),
        ("request_e2e_time<=8s", "got nothing of request_e2e_time, wanted a quantile between p0 and p100, or mean"),
        ("request_e2e_time:<=8s", "nothing after the colon"),
        ("request_e2e_time:p100<=8s", "got 'p100' of request_e2e_time, wanted a quantile"),
        ("request_e2e_time:p0<=8s", "got 'p0' of request_e2e_time, wanted a quantile"),
        ("request_e2e_time:q90<=8s", "got 'q90' of request_e2e_time, wanted a quantile"),
        ("request_e2e_time:p90<=fast", "got the limit 'fast'"),
        ("request_e2e_time:p90<=", "got the limit ''"),
        ("request_e2e_time:p90<=inf", "got the limit 'inf'"),
        ("request_e2e_time:p90<=-1s", "got the limit '-1s'"),
        ("request_e2e_time:p90<=8min", "unknown unit 'min' (known: s, ms)"),
        ("request_num_blocks:p90<=8s", "request_num_blocks is no time; leave out 's'"),
        ("error_rate:p90<=0.1", "leave out ':p90'"),
        ("error_rate<=1%", "error_rate is no time; leave out '%'"),
        ("<=8s", "no metric"),
        ("", "no operator"),
    ],
)
def test_a_wrong_rule_gives_one_line_that_names_it(text: str, said: str) -> None:
    with pytest.raises(SlaError) as caught:
        parse_rule(text)
    message = str(caught.value)
    assert said in message
    assert repr(text) in message
    assert "\n" not in message


def test_a_rule_of_a_file_names_its_place_there() -> None:
    with pytest.raises(SlaError, match=r"search\.yaml: sla\[1\] 'x<=1'"):
        parse_rule("x<=1", "search.yaml: sla[1]")


def test_an_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(SlaError) as caught:
        parse_rule("latency:p90<=8s")
    assert all(name in str(caught.value) for name in known_metrics())


@given(
    st.sampled_from(known_metrics()),
    st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.999, None]),
    st.sampled_from(sorted(OPERATORS)),
    st.floats(0, 1e6, allow_nan=False).map(lambda x: float(f"{x:.9g}")),
)
def test_the_text_of_a_rule_reads_back_as_the_rule(metric: str, q: float | None, op: str, threshold: float) -> None:
    rule = Rule(metric, None if metric in PLAIN_METRICS else q, op, threshold)
    assert parse_rule(rule.text) == rule


def test_errors_are_limited_unless_a_rule_speaks_of_them() -> None:
    latency = parse_rule("request_e2e_time:p90<=8s")
    errors = parse_rule("error_rate<=0.2")
    assert parse_rules(["request_e2e_time:p90<=8s"]) == (latency, IMPLICIT_ERROR_RULE)
    assert parse_rules(["request_e2e_time:p90<=8s", "error_rate<=0.2"]) == (latency, errors)


def test_a_rule_given_twice_is_judged_once_and_no_rule_means_none() -> None:
    assert len(parse_rules(["request_e2e_time:p90<=8s", "request_e2e_time:p90<=8000ms"])) == 2
    assert parse_rules([]) == ()


@pytest.mark.parametrize(
    ("mapping", "rule"),
    [
        ({"metric": "request_e2e_time", "quantile": 0.9, "threshold": 8, "op": "<="}, "request_e2e_time:p90<=8s"),
        ({"metric": "request_e2e_time", "quantile": "p99", "threshold": "500ms"}, "request_e2e_time:p99<=0.5s"),
        ({"metric": "request_e2e_time", "quantile": "mean", "threshold": 1, "op": "<"}, "request_e2e_time:mean<1s"),
        ({"metric": "goodput", "threshold": 2.5, "op": ">="}, "goodput>=2.5"),
    ],
)
def test_a_rule_is_read_from_yaml(mapping: dict[str, object], rule: str) -> None:
    assert rule_from_mapping(mapping, "search.yaml: sla[0]") == parse_rule(rule)


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"metric": "request_e2e_time", "quantil": 0.9, "threshold": 8}, "did you mean 'quantile'?"),
        ({"metric": "request_e2e_time", "quantile": 90, "threshold": 8}, "got quantile 90"),
        ({"metric": "request_e2e_time", "threshold": 8}, "wanted a quantile"),
        ({"metric": "request_e2e_time", "quantile": 0.9}, "no threshold"),
        ({"quantile": 0.9, "threshold": 8}, "no metric"),
        ({"metric": "error_rate", "quantile": 0.9, "threshold": 1}, "leave out its quantile"),
        ({"metric": "request_e2e_time", "quantile": 0.9, "threshold": 8, "op": "=<"}, "unknown operator '=<'"),
    ],
)
def test_a_wrong_yaml_rule_names_its_place(mapping: dict[str, object], said: str) -> None:
    with pytest.raises(SlaError, match=r"search\.yaml: sla\[0\]") as caught:
        rule_from_mapping(mapping, "search.yaml: sla[0]")
    assert said in str(caught.value)


def test_each_rule_gets_its_value_and_margin() -> None:
    figures = Figures(latencies=[1.0] * 89 + [4.0] * 11)
    quantile_rule, mean_rule, errors = evaluate(
        parse_rules(["request_e2e_time:p90<=8s", "request_e2e_time:mean<=1s"]), figures
    )
    assert (quantile_rule.value, quantile_rule.passed, quantile_rule.margin) == (4.0, True, 0.5)
    assert not mean_rule.passed
    assert mean_rule.margin == pytest.approx(-0.33)
    assert (errors.value, errors.passed) == (0.0, True)


def test_failed_requests_count_as_endless() -> None:
    figures = Figures(latencies=[1.0] * 80 + [math.inf] * 20)
    p75, p90, errors = evaluate(parse_rules(["request_e2e_time:p75<=8s", "request_e2e_time:p90<=8s"]), figures)
    assert p75.passed
    assert (p90.value, p90.passed, p90.margin) == (math.inf, False, -math.inf)
    assert not errors.passed


def test_a_rule_that_wants_large_values_is_not_helped_by_failures() -> None:
    figures = Figures(latencies=[5.0] * 80 + [math.inf] * 20)
    p10, _ = evaluate(parse_rules(["request_num_gen_tokens:p10>=4"]), figures)
    assert (p10.value, p10.passed) == (-math.inf, False)


def test_goodput_is_asked_about_the_request_rules_alone() -> None:
    figures = Figures(good=2.0)
    rules = parse_rules(["goodput>=1.5", "request_e2e_time:p90<=8s", "queue_depth_waiting:p90<=2"])
    assert evaluate(rules, figures)[0].margin == pytest.approx(1 / 3)
    assert figures.rules_of_goodput == [parse_rule("request_e2e_time:p90<=8s")]


@pytest.mark.parametrize(("num_judged", "is_said"), [(99, True), (100, False)])
def test_a_tail_of_few_requests_is_said(num_judged: int, is_said: bool) -> None:
    figures = Figures(latencies=[1.0] * num_judged)
    assert bool(evaluate([parse_rule("request_e2e_time:p90<=8s")], figures)[0].note) is is_said


@pytest.mark.parametrize(("op", "expected"), [("<=", True), ("<", False), (">=", True), (">", False), ("==", True)])
def test_a_value_on_the_limit(op: str, expected: bool) -> None:
    figures = Figures(latencies=[2.0] * 100)
    assert evaluate([parse_rule(f"request_e2e_time:p90{op}2s")], figures)[0].passed is expected
