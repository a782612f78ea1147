"""The verdict on a trial, from the events of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dbench.events import Event, RequestDone
from dbench.metrics import RunData, load_run
from dbench.progress import Verdict
from dbench.search.sla import Rule, parse_rules
from dbench.search.verdict import TrialEnd, judge, was_alone
from tests.event_builders import write_run
from tests.search.builders import Requests, run_events

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
        (0.1, Requests(num_failed=5), "error_rate<=0.1", True),
        (3.0, Requests(num_failed=5), "error_rate<=0.1", False),
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
        ([0, 10, 20], [5, 15, 25], [True, True, False]),
        ([0, 4, 20, 30], [5, 15, 25, 31], [False, False, True, False]),
        ([0, 1, 2, 30, 40], [25, 2, 3, 31, 41], [False, False, False, True, False]),
        ([0, 10, 20], [5, None, 25], [True, False, False]),
    ],
)
def test_which_requests_were_alone(starts: list[float], ends: list[float | None], alone: list[bool]) -> None:
    requests = pd.DataFrame({"intended_s": starts, "done_s": np.array(ends, dtype=float)})
    assert was_alone(requests).tolist() == alone


def is_end_of(event: Event, indices: range) -> bool:
    return isinstance(event, RequestDone) and event.request_id in {f"r{i}" for i in indices}


def delayed(event: Event, by_s: float) -> Event:
    return replace(event, at_s=event.at_s + by_s)
