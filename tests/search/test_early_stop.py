"""A trial that can no longer pass is ended, and judged as it would have been."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.events import RequestDone, RequestSent
from dbench.load.driver import run_load
from dbench.load.fake_target import InProcessTarget, Script
from dbench.load.stop import DoneFact, SentFact
from dbench.options import LoadOptions, SamplingOptions
from dbench.progress import Verdict
from dbench.search.early_stop import LostRuleStop
from dbench.search.sla import parse_rules
from dbench.search.verdict import TrialEnd, judge
from tests.event_builders import run_of
from tests.load.builders import events_of
from tests.search.builders import stopped_events

E2E = parse_rules(["request_e2e_time:p90<=1s"])


def watched(num_requests: int = 50, sla: str = "request_e2e_time:p90<=1s", num_sent: int = 50) -> LostRuleStop:
    """All sent at once at 0; of 50 requests 10 warm up and 40 are judged, 4 of which may be slow."""
    stop = LostRuleStop(parse_rules([sla]), num_requests)
    for index in range(num_sent):
        stop.sent(SentFact(index, 0.0, 0.0))
    return stop


def end(stop: LostRuleStop, indices: range, latency_s: float, *, completed: bool = True) -> None:
    for index in indices:
        stop.done(DoneFact(index, 0.0, latency_s, completed))


def test_one_request_more_than_the_quantile_allows_ends_the_trial() -> None:
    stop = watched()
    end(stop, range(46), 0.5)
    assert stop.reason(1.5) is None
    end(stop, range(46, 50), 2.0)
    assert stop.reason(2.0) is None
    other = watched()
    end(other, range(45), 0.5)
    assert other.reason(0.9) is None
    assert other.reason(1.1) == "request_e2e_time:p90<=1s is broken for certain"


def test_failed_requests_count_as_slow_and_the_warm_up_does_not_count() -> None:
    stop = watched()
    end(stop, range(10), 9.0)
    end(stop, range(10, 14), 0.1, completed=False)
    end(stop, range(15, 50), 0.1)
    assert stop.reason(0.5) is None
    end(stop, range(14, 15), 0.1, completed=False)
    assert stop.reason(0.5) is not None


@pytest.mark.parametrize(
    "sla", ["request_e2e_time:mean<=1s", "request_decode_time:p90<=1s", "request_e2e_time:p90>=1s"]
)
def test_only_upper_limits_on_quantiles_of_the_latency_end_a_trial(sla: str) -> None:
    assert watched(sla=sla).reason(100.0) is None


def test_a_slow_target_is_left_before_all_requests_are_sent(tmp_path: Path) -> None:
    load = LoadOptions(qps=100.0, num_requests=1000, interval_type="static", num_warmup_requests=0, gen_tokens=32)
    rules = parse_rules(["request_e2e_time:p90<=50ms"])
    target = InProcessTarget(Script(service_time=lambda request: 30.0, num_servers=1000))
    stop = LostRuleStop(rules, load.num_requests)
    result = asyncio.run(run_load(target, load, SamplingOptions(), tmp_path, extra_stop=stop))
    assert (result.reason, result.detail) == ("stopped", "request_e2e_time:p90<=0.05s is broken for certain")
    events = events_of(tmp_path)
    assert 280 < sum(isinstance(e, RequestSent) for e in events) < 1000  # 200 warm up, 81 have to be slow
    verdict = judge(TrialEnd.STOPPED, result.detail, run_of(*events), rules).verdict
    assert verdict in (Verdict.FAIL, Verdict.INVALID)  # invalid: this machine was too busy to send on time


@given(st.integers(5, 60), st.integers(1, 60), st.floats(0.1, 5.0), st.floats(0.0, 3.0), st.floats(0.2, 5.0))
def test_the_stored_part_of_a_stopped_trial_breaks_the_rule_that_stopped_it(
    num_requests: int, num_sent: int, qps: float, last_age_s: float, latency_s: float
) -> None:
    events = stopped_events(qps, num_requests, latency_s, num_sent=min(num_sent, num_requests), last_age_s=last_age_s)
    sent = [e for e in events if isinstance(e, RequestSent)]
    stop = LostRuleStop(E2E, num_requests)
    for event in sent:
        stop.sent(SentFact(event.index, event.intended_s, event.at_s))
    indices = {event.request_id: (event.index, event.intended_s) for event in sent}
    for done in events:
        if isinstance(done, RequestDone) and done.status == "COMPLETED":
            index, intended_s = indices[done.request_id]
            stop.done(DoneFact(index, intended_s, done.at_s, True))
    verdict = judge(TrialEnd.STOPPED, "", run_of(*events), E2E).verdict
    assert (verdict is Verdict.FAIL) is (stop.reason(events[-1].at_s) is not None)
