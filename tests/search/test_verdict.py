"""The verdict on a trial, from the events of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dbench.events import Event, RequestDone, RequestSent
from dbench.metrics import RunData, load_run
from dbench.progress import Verdict
from dbench.search.sla import Rule, parse_rules
from dbench.search.verdict import STOPPED_NOTE, Judgement, TrialEnd, judge, lag_reason, was_alone
from tests.event_builders import run_of, write_run
from tests.search.builders import Requests, run_events, stopped_events

NUM_REQUESTS = 50  # 10 of them warm up, 40 are judged


def run(tmp_path: Path, qps: float = 1.0, requests: Requests | None = None, reason: str = "complete") -> RunData:
    return stored(tmp_path, run_events(qps, NUM_REQUESTS, requests or Requests(), reason))


def stored(tmp_path: Path, events: list[Event]) -> RunData:
    write_run(tmp_path, events)
    return load_run(tmp_path)


def rules(*texts: str) -> tuple[Rule, ...]:
    return parse_rules(texts)


E2E = rules("request_e2e_time:p90<=1s")


def test_a_trial_that_keeps_every_rule_passes(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path), E2E)
    assert (judgement.verdict, judgement.reason) == (Verdict.PASS, "")
    assert [r.value for r in judgement.rules] == [pytest.approx(0.5), 0.0]


def test_a_broken_rule_is_named(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=Requests(2.5)), E2E)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == "request_e2e_time:p90 = 2.5s, wanted <=1s"


def test_the_first_fifth_of_the_requests_is_not_judged(tmp_path: Path) -> None:
    events = run_events(1.0, NUM_REQUESTS, Requests())
    slow_at_first = [delayed(e, 10.0) if is_end_of(e, range(10)) else e for e in events]
    assert judge(TrialEnd.COMPLETE, "", stored(tmp_path, slow_at_first), E2E).verdict is Verdict.PASS


def test_as_many_slow_requests_as_the_quantile_allows(tmp_path: Path) -> None:
    for num_slow, verdict in ((4, Verdict.PASS), (5, Verdict.FAIL)):
        events = run_events(1.0, NUM_REQUESTS, Requests())
        some_slow = [delayed(e, 10.0) if is_end_of(e, range(20, 20 + num_slow)) else e for e in events]
        data = stored(tmp_path / str(num_slow), some_slow)
        assert judge(TrialEnd.COMPLETE, "", data, E2E).verdict is verdict


def test_failed_requests_break_the_error_rate(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=Requests(num_failed=2)), E2E)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == "error_rate = 0.05, wanted <=0.01"


def test_a_timeout_fails_with_the_values_that_are_known(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.TIMEOUT, "not final in time", run(tmp_path, reason="timeout"), E2E)
    assert (judgement.verdict, judgement.reason) == (Verdict.FAIL, "timeout: not final in time")
    assert judgement.rules[0].passed


def test_a_crash_fails_without_values(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.CRASHED, "gone", run(tmp_path, reason="server_lost"), E2E)
    assert (judgement.verdict, judgement.reason, judgement.rules) == (Verdict.FAIL, "crash: gone", ())


def test_without_rules_nothing_is_judged(tmp_path: Path) -> None:
    assert judge(TrialEnd.COMPLETE, "", run(tmp_path), ()).verdict is Verdict.UNJUDGED


@pytest.mark.parametrize(
    ("sla", "lag_s", "verdict"),
    [
        ("request_e2e_time:p90<=5s", 0.09, Verdict.PASS),
        ("request_e2e_time:p90<=5s", 0.11, Verdict.INVALID),
        ("request_e2e_time:p90<=700ms", 0.019, Verdict.PASS),
        ("request_e2e_time:p90<=700ms", 0.021, Verdict.INVALID),
        ("error_rate<=0.5", 0.021, Verdict.INVALID),
    ],
)
def test_a_late_load_generator_makes_a_trial_invalid(tmp_path: Path, sla: str, lag_s: float, verdict: Verdict) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=Requests(lag_s=lag_s)), rules(sla))
    assert judgement.verdict is verdict
    assert ("send lag" in judgement.reason) is (verdict is Verdict.INVALID)


@pytest.mark.parametrize(("limit", "verdict"), [(0.9, Verdict.PASS), (1.1, Verdict.FAIL)])
def test_goodput_counts_the_requests_that_keep_the_request_rules(
    tmp_path: Path, limit: float, verdict: Verdict
) -> None:
    data = run(tmp_path)  # 40 judged requests within 39 s and the last one's half second
    assert (
        judge(TrialEnd.COMPLETE, "", data, rules(f"goodput>={limit}", *["request_e2e_time:p90<=1s"])).verdict is verdict
    )


@pytest.mark.parametrize(
    ("sla", "limit_s"),
    [
        (("request_scheduling_delay:p99<=4s", "request_e2e_time:p90<=8s"), 0.08),
        (("request_prefill_time:mean<3s",), 0.06),
        (("request_e2e_time:p90<=300ms",), 0.02),
        (("request_e2e_time_normalized:p90<=2s", "request_e2e_time:p90<=5s"), 0.1),
        (("goodput>=0.1",), 0.02),
    ],
)
def test_the_allowed_lag_follows_the_tightest_limit_in_seconds(
    tmp_path: Path, sla: tuple[str, ...], limit_s: float
) -> None:
    for lag_s, is_late in ((limit_s - 0.001, False), (limit_s + 0.001, True)):
        data = run(tmp_path / str(lag_s), requests=Requests(lag_s=lag_s))
        assert bool(lag_reason(data, rules(*sla))) is is_late


def test_a_quantile_beyond_the_requests_that_completed_is_not_reached(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=Requests(num_failed=5)), E2E)
    reason, errors = judgement.reason.split("; ")
    assert reason == "request_e2e_time:p90 not reached: too many requests failed, wanted <=1s"
    assert errors == "error_rate = 0.125, wanted <=0.01"


# ---- growth ----

GROWING = Requests(0.5, growth_s=0.02)  # request n takes 0.5 + 0.02 n: over the 39 gaps of the judged ones 0.78 s


@pytest.mark.parametrize(("limit", "verdict"), [("3s", Verdict.FAIL), ("3.2s", Verdict.PASS)])
def test_latency_that_grows_by_a_quarter_of_its_limit_fails(tmp_path: Path, limit: str, verdict: Verdict) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=GROWING), rules(f"request_e2e_time:p90<={limit}"))
    assert judgement.verdict is verdict
    assert all(result.passed for result in judgement.rules)
    assert not judgement.hopeless


def test_growth_is_named_with_what_was_allowed(tmp_path: Path) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=GROWING), rules("request_e2e_time:p90<=2s"))
    assert judgement.reason == (
        "latency grows through the trial: request_e2e_time by 0.78s from its first judged request to its last, "
        "allowed 0.5s for request_e2e_time:p90<=2s"
    )


@pytest.mark.parametrize("sla", ["request_time_to_first_block:p90<=200ms", "request_e2e_time:p10>=1ms", "goodput>=0.1"])
def test_growth_counts_for_upper_limits_on_the_metric_that_grows(tmp_path: Path, sla: str) -> None:
    assert judge(TrialEnd.COMPLETE, "", run(tmp_path, requests=GROWING), rules(sla)).verdict is Verdict.PASS


@pytest.mark.parametrize(("num_requests", "verdict"), [(24, Verdict.FAIL), (23, Verdict.PASS)])
def test_fewer_than_two_judged_requests_per_block_do_not_grow(
    tmp_path: Path, num_requests: int, verdict: Verdict
) -> None:
    events = run_events(1.0, num_requests, Requests(0.1, growth_s=0.05))  # 20 or 19 of them are judged
    assert judge(TrialEnd.COMPLETE, "", stored(tmp_path, events), rules("request_e2e_time:p90<=2s")).verdict is verdict


# ---- stopped early ----


def judged_part(*sla: str, qps: float = 1.0, latency_s: float = 4.0) -> Judgement:
    """16 of 50 requests were sent, 6 of them to be judged, the last one 0.2 s before the end.

    At 1 QPS and 4 s per request two of the six have ended, and four are 3.2, 2.2, 1.2 and 0.2 s old: of 40 values,
    the 36th smallest is at least 1.2.
    """
    events = stopped_events(qps, NUM_REQUESTS, latency_s, num_sent=16, last_age_s=0.2)
    return judge(TrialEnd.STOPPED, "a rule was lost", run_of(*events), rules(*sla))


def test_a_stopped_trial_fails_by_what_its_value_is_at_least() -> None:
    judgement = judged_part("request_e2e_time:p90<=1s")
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == "stopped early: request_e2e_time:p90 >= 1.2s, wanted <=1s"
    (result,) = judgement.rules
    assert result.value == pytest.approx(1.2)
    assert (result.passed, result.note) == (False, STOPPED_NOTE)


@pytest.mark.parametrize(
    ("sla", "verdict"),
    [
        ("request_e2e_time:p90<=1.19s", Verdict.FAIL),
        ("request_e2e_time:p90<=1.21s", Verdict.UNDECIDED),
        ("request_e2e_time:p95<=3.19s", Verdict.FAIL),
        ("request_e2e_time:p80<=1s", Verdict.UNDECIDED),
        ("request_e2e_time:mean<=1ms", Verdict.UNDECIDED),
        ("request_e2e_time:p10>=100s", Verdict.UNDECIDED),
        ("goodput>=100", Verdict.UNDECIDED),
        ("error_rate<=0.01", Verdict.UNDECIDED),
    ],
)
def test_a_stopped_trial_answers_another_sla_where_its_part_decides(sla: str, verdict: Verdict) -> None:
    judgement = judged_part(sla)
    assert judgement.verdict is verdict
    assert judgement.reason.startswith(
        "undecided: stopped early" if verdict is Verdict.UNDECIDED else "stopped early: "
    )


def test_a_stopped_trial_without_rules_is_undecided() -> None:
    assert judged_part().verdict is Verdict.UNDECIDED


def test_requests_that_failed_before_the_stop_decide_too() -> None:
    events = stopped_events(1.0, NUM_REQUESTS, 4.0, num_sent=16)
    failed = [replace(e, status="ERROR") if isinstance(e, RequestDone) and e.request_id == "r10" else e for e in events]
    judgement = judge(TrialEnd.STOPPED, "", run_of(*failed), rules("error_rate<=0.02", "request_e2e_time:p99<=9s"))
    assert [(r.rule.metric, r.value) for r in judgement.rules] == [("error_rate", 1 / 40), ("request_e2e_time", np.inf)]


def test_a_late_load_generator_makes_a_stopped_trial_invalid() -> None:
    late = [
        replace(e, at_s=e.at_s + 0.5) if isinstance(e, RequestSent) else e
        for e in stopped_events(1.0, NUM_REQUESTS, 4.0, num_sent=16)
    ]
    assert judge(TrialEnd.STOPPED, "", run_of(*late), E2E).verdict is Verdict.INVALID


@pytest.mark.parametrize(("qps", "hopeless"), [(0.1, True), (1.0, False)])
def test_a_stopped_trial_of_requests_that_were_alone_is_hopeless(qps: float, hopeless: bool) -> None:
    events = stopped_events(qps, NUM_REQUESTS, 4.0, num_sent=15, last_age_s=1.2)  # 5 judged ones, as many as it takes
    judgement = judge(TrialEnd.STOPPED, "", run_of(*events), E2E)
    assert (judgement.verdict, judgement.hopeless) == (Verdict.FAIL, hopeless)


def test_goodput_leaves_slow_requests_out(tmp_path: Path) -> None:
    data = run(tmp_path, requests=Requests(2.0))
    judgement = judge(TrialEnd.COMPLETE, "", data, rules("goodput>=0.5", "request_e2e_time:mean<=1s"))
    assert judgement.rules[0].value == 0


@pytest.mark.parametrize(
    ("qps", "requests", "sla", "hopeless"),
    [
        (0.1, Requests(2.0), "request_e2e_time:p90<=1s", True),
        (0.1, Requests(2.0), "request_e2e_time:mean<=1s", True),
        (1.0, Requests(2.0), "request_e2e_time:p90<=1s", False),
        (0.1, Requests(num_failed=1), "error_rate<=0.01", False),
        (0.1, Requests(num_failed=1), "request_e2e_time:p99<=1s", False),
        (0.1, Requests(num_failed=1), "request_e2e_time:mean<=1s", False),
        (1.0, Requests(), "goodput>=1.5", True),
        (2.0, Requests(), "goodput>=3", True),
        (2.0, Requests(), "goodput>=1.99", False),
    ],
)
def test_a_fail_of_requests_that_were_alone_is_hopeless(
    tmp_path: Path, qps: float, requests: Requests, sla: str, hopeless: bool
) -> None:
    judgement = judge(TrialEnd.COMPLETE, "", run(tmp_path, qps, requests), rules(sla))
    assert judgement.hopeless is hopeless


@pytest.mark.parametrize(
    ("starts", "ends", "alone"),
    [
        ([0, 10, 20], [5, 15, 25], [True, True, True]),
        ([0, 4, 20, 30], [5, 15, 25, 31], [False, False, True, True]),
        ([0, 1, 2, 30, 40], [25, 2, 3, 31, 41], [False, False, False, True, True]),
        ([0, 10, 20], [5, None, 25], [True, False, False]),
    ],
)
def test_which_requests_were_alone(starts: list[float], ends: list[float | None], alone: list[bool]) -> None:
    requests = pd.DataFrame({"intended_s": starts, "done_s": np.array(ends, dtype=float)})
    assert was_alone(requests, all_sent=False).tolist() == alone
    assert was_alone(requests, all_sent=True).tolist() == [*alone[:-1], False]  # an unmeasured one may follow


def is_end_of(event: Event, indices: range) -> bool:
    return isinstance(event, RequestDone) and event.request_id in {f"r{i}" for i in indices}


def delayed(event: Event, by_s: float) -> Event:
    return replace(event, at_s=event.at_s + by_s)
