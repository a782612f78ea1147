"""Searches over systems whose behaviour is written down, so that their capacity is known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dbench.errors import ServerStartError
from dbench.events import SCHEMA_VERSION, Event, RequestDone, RequestSent, RunEnded, RunStarted
from dbench.load.driver import EXIT_CODES, RunResult
from dbench.load.stop import StopRule
from dbench.options import LoadOptions
from dbench.progress import RunPhase, RunProgress
from dbench.search.objective import OnRun
from dbench.search.plan import Job, SearchPlan, plan_search
from dbench.search.results import JobResult, SearchResults
from dbench.search.study import OnProgress, Tools, run_search
from tests.event_builders import write_run

SLA = "request_e2e_time:p90<=1s"
FAST_S, SLOW_S = 0.5, 4.0


@dataclass(frozen=True)
class Requests:
    """What the requests of one run went through."""

    latency_s: float = FAST_S
    lag_s: float = 0.0
    num_failed: int = 0
    """The first requests after the warm-up end as ERROR."""
    growth_s: float = 0.0
    """By how much each request takes longer than the one before."""


Behaviour = Callable[[float], Requests]


def sustains(capacity: float) -> Behaviour:
    """Fast up to this rate, slow beyond it."""
    return lambda qps: Requests(FAST_S if qps <= capacity else SLOW_S)


@dataclass
class ScriptedRunner:
    """A TrialRunner that writes the events of a run without waiting for anything."""

    behaviour: Behaviour
    endings: Mapping[float, list[str]] = field(default_factory=dict)
    """Rate -> reasons of its runs, in turn; complete when there is no more. A reason "error" raises instead."""
    ran: list[float] = field(default_factory=list)
    """Rates that were run, probes as 0."""
    log: Path | None = None
    """The same as a file, for other processes to read."""
    delay_s: float = 0.0
    num_closed: int = 0

    def run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun, stop: StopRule) -> RunResult:
        qps = 0.0 if load.concurrency is not None else load.qps
        self.ran.append(qps)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {qps!r}\n")
        on_progress(_progress(load))
        time.sleep(self.delay_s)
        reasons = self.endings.get(qps, [])
        reason = reasons.pop(0) if reasons else "complete"
        if reason == "error":
            raise ServerStartError("no worker became ready")
        requests = self.behaviour(qps)
        if reason == "stopped":
            write_run(run_dir, stopped_events(qps, load.num_requests, requests.latency_s))
        else:
            write_run(run_dir, run_events(qps, load.num_requests, requests, reason))
        return RunResult(run_dir, reason, EXIT_CODES[reason], f"scripted {reason}" if reason != "complete" else "")

    def close(self) -> None:
        self.num_closed += 1


def run_events(qps: float, num_requests: int, requests: Requests, reason: str = "complete") -> list[Event]:
    """Evenly spaced requests; a closed loop (qps 0) has ten of them in flight."""
    gap_s = 1 / qps if qps else requests.latency_s / 10
    num_warmup = num_requests // 5
    events: list[Event] = [RunStarted(100.0, "client", 0.0, SCHEMA_VERSION, num_requests, qps)]
    for index in range(num_requests):
        intended_s, name = 100.0 + index * gap_s, f"r{index}"
        sent_s = intended_s + requests.lag_s
        done_s = sent_s + requests.latency_s + index * requests.growth_s
        events.append(RequestSent(sent_s, "client", name, index, "measured", intended_s, 64, 32))
        if reason != "complete" and index == num_requests - 1:
            continue
        failed = num_warmup <= index < num_warmup + requests.num_failed
        status, tokens = ("ERROR", 0) if failed else ("COMPLETED", 32)
        events.append(RequestDone(done_s, "client", name, status, tokens, 4, intended_s + 0.1, "", ""))
    events.append(RunEnded(100.0 + num_requests * gap_s + 10, "client", reason, ""))
    return events


STOPPED_AFTER = 7
"""Requests that a scripted run has sent when it is stopped early."""
STOPPED_AGE_S = 1.5
"""How long the last of them has then been in the system."""


def stopped_events(
    qps: float, num_requests: int, latency_s: float, *, num_sent: int = STOPPED_AFTER, last_age_s: float = STOPPED_AGE_S
) -> list[Event]:
    """A run that was stopped early, like run_events until then; what was in the system is cancelled."""
    stop_s = 100.0 + (num_sent - 1) / qps + last_age_s
    sent = {f"r{index}" for index in range(num_sent)}
    kept: list[Event] = []
    for event in run_events(qps, num_requests, Requests(latency_s)):
        if isinstance(event, RequestSent | RequestDone) and event.request_id not in sent:
            continue
        if isinstance(event, RequestDone) and event.at_s > stop_s:
            event = RequestDone(stop_s, "client", event.request_id, "CANCELLED", 0, 0, None, "the run was stopped", "")
        if not isinstance(event, RunEnded):
            kept.append(event)
    return [*kept, RunEnded(stop_s, "client", "stopped", "a rule was lost")]


def plan(folder: Path, **flags: object) -> SearchPlan:
    """A search of one job with this SLA unless `sla` says otherwise; None leaves an option unset."""
    given = {"sla": [SLA], "num_requests": 20, "output_dir": str(folder), "start_qps": 1.0, **flags}
    return plan_search(given, config_path=None, environment={})


def search(
    plan: SearchPlan, runner: ScriptedRunner | Callable[[Job], ScriptedRunner], on_progress: OnProgress | None = None
) -> SearchResults:
    """Run the search without reports and figures."""
    make = (lambda job, folder: runner) if isinstance(runner, ScriptedRunner) else (lambda job, folder: runner(job))
    return run_search(plan, tools=Tools(make, _nothing, _nothing), on_progress=on_progress)


def only_job(results: SearchResults) -> JobResult:
    assert len(results.jobs) == 1
    return results.jobs[0]


def rates(job: JobResult) -> list[float]:
    return [trial.qps for trial in job.trials]


def _progress(load: LoadOptions) -> RunProgress:
    return RunProgress(
        name=load.name or "",
        target="script",
        phase=RunPhase.MEASURING,
        elapsed_s=0.0,
        eta_s=None,
        num_requests=load.num_requests,
        num_sent=0,
        num_completed=0,
        num_failed=0,
        in_flight=0,
        offered_qps=load.qps,
        achieved_qps=0.0,
        latency_p50_s=None,
        latency_p90_s=None,
        latency_p99_s=None,
        lag_p99_s=None,
        workers=(),
        recent_errors=(),
    )


def _nothing(*_: object) -> None:
    """For what the test does not look at."""
