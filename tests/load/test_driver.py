"""Runs against a scripted target: what is sent when, what is written, and how a run ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dbench.errors import RunCutShort, RunError, ServerUnavailable
from dbench.events import (
    Event,
    LoadDrawn,
    RequestArrived,
    RequestDone,
    RequestSent,
    RunEnded,
    RunStarted,
)
from dbench.load.arrivals import arrival_times
from dbench.load.driver import RunResult, run_load
from dbench.load.fake_target import InProcessTarget, NoopTarget, Script
from dbench.load.schedule import Stream
from dbench.load.stop import DoneFact, SentFact
from dbench.load.target import LoadRequest, Outcome, TargetInfo
from dbench.options import SamplingOptions
from dbench.progress import RunPhase, RunProgress
from tests.limits import largest_file
from tests.load.builders import events_of, indices, run, small_load

FOREVER_S = 60.0


def measured(event: RequestSent) -> bool:
    return event.role == "measured"


def tail(event: RequestSent) -> bool:
    return event.role == "tail"


def slow(*slow_indices: int, seconds: float = FOREVER_S) -> Callable[[LoadRequest], float]:
    """A service time for the requests of these indices; the others take none."""
    return lambda request: seconds if request.index in slow_indices else 0.0


def test_every_measured_request_is_sent_once_and_completes(tmp_path: Path) -> None:
    ran = run(InProcessTarget(Script()), small_load(), tmp_path)
    assert (ran.result.reason, ran.result.exit_code) == ("complete", 0)
    sent = ran.of(RequestSent, measured)
    done = {event.request_id: event for event in ran.of(RequestDone)}
    assert indices(sent) == list(range(8))
    assert all(done[event.request_id].status == "COMPLETED" for event in sent)
    assert all(done[event.request_id].num_gen_tokens == 32 for event in sent)
    assert all(len(done[event.request_id].token_ids_sha256) == 64 for event in sent)


def test_full_disk_ends_the_run_with_one_error_and_what_was_measured(tmp_path: Path) -> None:
    target = InProcessTarget(Script(service_time=slow(7)))
    with largest_file(3000), pytest.raises(RunCutShort, match="no further event can be written") as caught:
        run(target, small_load(), tmp_path)
    assert caught.value.run_dir == tmp_path
    kept = events_of(tmp_path)
    assert isinstance(kept[0], LoadDrawn)
    assert any(isinstance(event, RequestDone) for event in kept)
    assert not any(isinstance(event, RunEnded) for event in kept)


def test_run_that_ends_in_its_warm_up_keeps_no_events_of_others(tmp_path: Path) -> None:
    target = InProcessTarget(Script(service_time=lambda request: FOREVER_S))
    ran = run(target, small_load(num_warmup_requests=1, benchmark_timeout=0.01), tmp_path)
    assert ran.result.reason == "timeout"
    assert ran.of(RequestArrived) == []


def test_the_log_begins_with_the_draw_and_ends_with_the_reason(tmp_path: Path) -> None:
    ran = run(InProcessTarget(Script()), small_load(), tmp_path)
    assert isinstance(ran.events[0], LoadDrawn)
    assert isinstance(ran.events[-1], RunEnded)
    assert ran.events[-1].reason == "complete"


def test_intended_times_are_the_drawn_ones_and_nothing_is_sent_before(tmp_path: Path) -> None:
    load = small_load(seed=5)
    ran = run(InProcessTarget(Script()), load, tmp_path)
    (started,) = ran.of(RunStarted)
    sequence = np.random.SeedSequence(5, spawn_key=(Stream.ARRIVALS,))
    times = arrival_times("poisson", load.qps, load.cv, np.random.Generator(np.random.PCG64(sequence)))
    sent = ran.of(RequestSent, measured)
    assert [event.intended_s - started.at_s for event in sent] == pytest.approx(list(islice(times, 8)))
    assert all(event.at_s >= event.intended_s for event in sent)


def test_a_server_that_does_not_answer_does_not_hold_back_the_sends(tmp_path: Path) -> None:
    target = InProcessTarget(Script(service_time=slow(0, seconds=0.3)))
    ran = run(target, small_load(qps=1000.0), tmp_path)
    first_done = min(event.at_s for event in ran.of(RequestDone))
    assert all(event.at_s < first_done for event in ran.of(RequestSent, measured))


def test_warm_up_requests_end_before_the_clock_starts_and_are_forgotten_by_the_target(tmp_path: Path) -> None:
    ran = run(InProcessTarget(Script()), small_load(num_warmup_requests=3), tmp_path)
    warmup = {event.request_id for event in ran.of(RequestSent, lambda event: event.role == "warmup")}
    (started,) = ran.of(RunStarted)
    assert len(warmup) == 3
    assert all(event.at_s < started.at_s for event in ran.of(RequestDone, lambda e: e.request_id in warmup))
    assert not warmup & {event.request_id for event in ran.of(RequestArrived)}


def test_the_events_of_the_target_are_appended(tmp_path: Path) -> None:
    ran = run(InProcessTarget(Script()), small_load(), tmp_path)
    assert {e.request_id for e in ran.of(RequestArrived)} == {e.request_id for e in ran.of(RequestSent)}


def test_arrivals_go_on_unmeasured_until_the_last_measured_request_is_final(tmp_path: Path) -> None:
    target = InProcessTarget(Script(service_time=slow(7, seconds=0.2), num_servers=2))
    ran = run(target, small_load(), tmp_path)
    sent = {event.request_id: event for event in ran.of(RequestSent)}
    last_end = max(e.at_s for e in ran.of(RequestDone) if sent[e.request_id].role == "measured")
    extra = ran.of(RequestSent, tail)
    assert extra
    assert indices(extra) == list(range(8, 8 + len(extra)))
    assert all(event.intended_s <= last_end for event in extra)


def test_tail_requests_in_flight_at_the_end_are_cancelled(tmp_path: Path) -> None:
    def service_time(request: LoadRequest) -> float:
        return 0.1 if request.index < 8 else FOREVER_S

    ran = run(InProcessTarget(Script(service_time, num_servers=100)), small_load(), tmp_path)
    done = {event.request_id: event for event in ran.of(RequestDone)}
    extra = ran.of(RequestSent, tail)
    assert extra
    assert {done[event.request_id].status for event in extra} == {"CANCELLED"}
    assert ran.result.reason == "complete"


def test_all_at_once_is_sent_at_once_and_has_no_tail(tmp_path: Path) -> None:
    ran = run(InProcessTarget(Script(slow(3, seconds=0.1))), small_load(qps=math.inf), tmp_path)
    (started,) = ran.of(RunStarted)
    assert started.offered_qps == math.inf
    assert {event.intended_s for event in ran.of(RequestSent)} == {started.at_s}
    assert len(ran.of(RequestSent)) == 8


class CountingTarget(InProcessTarget):
    """Knows how many requests it held at most."""

    in_flight = 0
    most = 0

    async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return await super().generate(request, accepted)
        finally:
            self.in_flight -= 1


def test_a_closed_loop_keeps_its_number_in_flight(tmp_path: Path) -> None:
    target = CountingTarget(Script(lambda request: 0.01, num_servers=100))
    ran = run(target, small_load(concurrency=3, num_requests=12), tmp_path)
    assert target.most == 3
    assert sorted(indices(ran.of(RequestSent, measured))) == list(range(12))
    assert ran.of(RunStarted)[0].offered_qps == 0.0


def test_a_closed_loop_starts_a_request_when_one_has_ended(tmp_path: Path) -> None:
    ran = run(InProcessTarget(Script(lambda request: 0.01)), small_load(concurrency=1, num_requests=4), tmp_path)
    ends = [event.at_s for event in ran.of(RequestDone)]
    starts = [event.intended_s for event in ran.of(RequestSent)]
    assert all(end <= start for end, start in zip(ends[:3], starts[1:4], strict=True))


def test_a_closed_loop_goes_on_unmeasured_but_does_not_flood_a_server_that_refuses(tmp_path: Path) -> None:
    script = Script(slow(3, seconds=0.1), num_servers=9, error=lambda request: "full" if request.index > 3 else "")
    ran = run(InProcessTarget(script), small_load(concurrency=3, num_requests=4), tmp_path)
    assert len(ran.of(RequestSent, tail)) == 2


def test_a_failed_request_is_an_end_with_its_error(tmp_path: Path) -> None:
    script = Script(error=lambda request: "block 0 step 1: non-finite logits" if request.index == 2 else "")
    ran = run(InProcessTarget(script), small_load(), tmp_path)
    (failed,) = ran.of(RequestDone, lambda event: event.status == "ERROR")
    assert failed.error == "block 0 step 1: non-finite logits"
    assert failed.token_ids_sha256 == ""
    assert ran.result.reason == "complete"


class FullTarget(NoopTarget):
    """Refuses before it has given a name."""

    async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
        return Outcome("", "ERROR", (), 0, None, "the server holds 10000 requests")


def test_a_request_that_is_refused_without_a_name_is_in_the_log_all_the_same(tmp_path: Path) -> None:
    ran = run(FullTarget(), small_load(), tmp_path)
    assert statuses(ran.of(RequestSent, measured), ran.of(RequestDone)) == dict.fromkeys(range(8), "ERROR")


def test_a_run_that_hits_its_timeout_keeps_what_it_measured(tmp_path: Path) -> None:
    target = InProcessTarget(Script(slow(2, 5), num_servers=9))
    ran = run(target, small_load(benchmark_timeout=0.2), tmp_path)
    assert (ran.result.reason, ran.result.exit_code) == ("timeout", 1)
    assert statuses(ran.of(RequestSent, measured), ran.of(RequestDone)) == {
        index: "TIMEOUT" if index in (2, 5) else "COMPLETED" for index in range(8)
    }
    assert ran.of(RequestArrived)


def test_a_warm_up_that_never_ends_hits_the_timeout(tmp_path: Path) -> None:
    load = small_load(num_warmup_requests=1, benchmark_timeout=0.1)
    ran = run(InProcessTarget(Script(slow(-1))), load, tmp_path)
    assert ran.result.reason == "timeout"
    assert not ran.of(RunStarted)


def test_a_closed_loop_times_out_when_nothing_comes_back(tmp_path: Path) -> None:
    target = InProcessTarget(Script(slow(2), num_servers=1))
    ran = run(target, small_load(concurrency=1, benchmark_timeout=0.1), tmp_path)
    assert ran.result.reason == "timeout"
    assert statuses(ran.of(RequestSent), ran.of(RequestDone)) == {0: "COMPLETED", 1: "COMPLETED", 2: "TIMEOUT"}


def test_a_target_that_goes_away_ends_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    target = InProcessTarget(Script(lambda request: 0.05, num_servers=9, lost_at=5))
    ran = run(target, small_load(qps=50.0), tmp_path)
    assert (ran.result.reason, ran.result.exit_code) == ("server_lost", 1)
    assert "gone away" in ran.result.detail
    assert {e.request_id for e in ran.of(RequestSent)} == {e.request_id for e in ran.of(RequestDone)}
    assert "ERROR" in {event.status for event in ran.of(RequestDone)}


def test_a_target_that_is_gone_at_the_start_is_an_error_and_leaves_no_log(tmp_path: Path) -> None:
    class Gone(NoopTarget):
        async def info(self) -> TargetInfo:
            raise ServerUnavailable("nobody answers at x:1")

    with pytest.raises(ServerUnavailable, match="nobody answers"):
        run(Gone(), small_load(), tmp_path)
    assert not list(tmp_path.iterdir())


class MuteTarget(InProcessTarget):
    """Does its work, but cannot hand over its events."""

    async def export_events(self) -> AsyncIterator[Event]:
        for event in connection_reset():
            yield event


def connection_reset() -> Iterator[Event]:
    raise ServerUnavailable("connection reset")


def test_a_target_that_is_lost_before_its_events_are_fetched_makes_the_run_incomplete(tmp_path: Path) -> None:
    ran = run(MuteTarget(Script()), small_load(), tmp_path)
    assert (ran.result.reason, ran.result.exit_code) == ("server_lost", 1)
    assert "connection reset" in ran.result.detail
    assert len(ran.of(RequestDone)) == len(ran.of(RequestSent))


def test_a_cancelled_run_ends_as_interrupted_and_keeps_what_it_measured(tmp_path: Path) -> None:
    async def interrupted() -> RunResult:
        target = InProcessTarget(Script(slow(4), num_servers=9))
        task = asyncio.create_task(run_load(target, small_load(qps=1000.0), SamplingOptions(), tmp_path))
        while not (tmp_path / "events.jsonl").exists() or len(events_of(tmp_path)) < 17:
            await asyncio.sleep(0.01)
        task.cancel()
        return await task

    result = asyncio.run(interrupted())
    assert (result.reason, result.exit_code) == ("interrupted", 130)
    events = events_of(tmp_path)
    sent = [e for e in events if isinstance(e, RequestSent) and measured(e)]
    ends = [e for e in events if isinstance(e, RequestDone)]
    assert statuses(sent, ends) == {index: "CANCELLED" if index == 4 else "COMPLETED" for index in range(8)}
    assert any(isinstance(e, RequestArrived) for e in events)
    assert isinstance(events[-1], RunEnded)


def test_requests_that_the_run_gives_up_are_failures_but_no_errors_to_show(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[RunProgress] = []
    script = Script(slow(-1, 2, 5), num_servers=9)
    load = small_load(num_warmup_requests=0, benchmark_timeout=0.05)
    assert (
        run(InProcessTarget(script), load, tmp_path / "measured", on_progress=shown.append).result.reason == "timeout"
    )
    assert (shown[-1].num_failed, shown[-1].recent_errors) == (2, ())
    load = small_load(num_warmup_requests=1, benchmark_timeout=0.05)
    assert run(InProcessTarget(script), load, tmp_path / "warm-up").result.reason == "timeout"
    assert caplog.messages == []


class After:
    """A stop rule that has seen enough after so many results."""

    def __init__(self, enough: float) -> None:
        self.enough = enough
        self.sent_indices: list[int] = []
        self.facts: list[DoneFact] = []

    def sent(self, fact: SentFact) -> None:
        self.sent_indices.append(fact.index)

    def done(self, fact: DoneFact) -> None:
        self.facts.append(fact)

    def reason(self, now_s: float) -> str | None:
        return f"{self.enough} are done" if len(self.facts) >= self.enough else None


def test_a_stop_rule_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    rule = After(3)
    target = InProcessTarget(Script(slow(3, 4, 5, 6, 7), num_servers=9))
    ran = run(target, small_load(), tmp_path, extra_stop=rule)
    assert (ran.result.reason, ran.result.detail, ran.result.exit_code) == ("stopped", "3 are done", 1)
    by_status = statuses(ran.of(RequestSent, measured), ran.of(RequestDone))
    assert set(by_status.values()) == {"COMPLETED", "CANCELLED"}


def test_a_stop_rule_hears_of_every_measured_request_and_of_no_other(tmp_path: Path) -> None:
    rule = After(math.inf)
    script = Script(slow(6, seconds=0.1), num_servers=9, error=lambda r: "bad" if r.index == 1 else "")
    run(InProcessTarget(script), small_load(num_warmup_requests=2), tmp_path, extra_stop=rule)
    assert rule.sent_indices == list(range(8))
    assert sorted(fact.index for fact in rule.facts) == list(range(8))
    assert [fact.index for fact in rule.facts if not fact.completed] == [1]
    assert all(fact.latency_s > 0 for fact in rule.facts)


def test_an_error_inside_a_target_is_raised_and_the_log_is_kept(tmp_path: Path) -> None:
    class Broken(InProcessTarget):
        async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
            if request.index == 3:
                raise ZeroDivisionError("a bug")
            return await super().generate(request, accepted)

    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(Broken(Script()), small_load(), tmp_path)
    assert {e.index for e in events_of(tmp_path) if isinstance(e, RequestSent)} >= {0, 1, 2}


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    run(NoopTarget(), small_load(), tmp_path)
    with pytest.raises(RunError, match="already holds a run"):
        run(NoopTarget(), small_load(), tmp_path)


def test_the_last_snapshot_shows_the_whole_run(tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    script = Script(slow(6, seconds=0.1), num_servers=2, error=lambda r: "bad luck" if r.index == 1 else "")
    run(InProcessTarget(script), small_load(name="night"), tmp_path, on_progress=seen.append)
    last = seen[-1]
    assert (last.name, last.phase) == ("night", RunPhase.EXPORTING)
    assert (last.num_requests, last.num_sent, last.num_completed, last.num_failed, last.in_flight) == (8, 8, 7, 1, 0)
    assert last.latency_p50_s is not None
    assert last.latency_p99_s is not None
    assert last.latency_p50_s <= last.latency_p99_s
    assert [worker.worker_id for worker in last.workers] == [0, 1]
    assert len(last.recent_errors) == 1
    assert "bad luck" in last.recent_errors[0]


def statuses(sent: list[RequestSent], done: list[RequestDone]) -> dict[int, str]:
    """Index -> status."""
    by_id = {event.request_id: event.status for event in done}
    return {event.index: by_id[event.request_id] for event in sent}
