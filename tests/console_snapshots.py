"""Small snapshots for the tests of the terminal views."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from dbench.console.layout import Lines, Page
from dbench.console.live import draw
from dbench.console.look import UNICODE, Glyphs
from dbench.console.rates import Rate, RateTable
from dbench.progress import (
    Progress,
    RuleProgress,
    RunPhase,
    RunProgress,
    SearchProgress,
    ServeProgress,
    ServerState,
    TrialProgress,
    Verdict,
    WorkerProgress,
)

RULE = "request_e2e_time:p90<=8s"
ERROR_RULE = "error_rate<=0.01"
RATES = RateTable({0: Rate(912.4, 3.12, (1.0, 2.0, 3.0))}, Rate(912.4, 3.12), requests_per_s=1.5)

_WORKER = WorkerProgress(
    worker_id=0,
    device="cuda:0",
    state="busy",
    queue_depth_waiting=3,
    queue_depth_active=16,
    pages_used=610,
    pages_total=1000,
    num_forward_passes=100,
    num_unmasked_tokens=312,
)
_SERVE = ServeProgress(
    address="127.0.0.1:50051",
    model="embedded",
    state=ServerState.READY,
    uptime_s=63.2,
    num_in_server=12,
    num_pending=3,
    num_completed=1408,
    num_failed=2,
    num_cancelled=1,
    workers=(_WORKER,),
    recent_errors=(),
)
_RUN = RunProgress(
    name="arxiv",
    target="127.0.0.1:50051",
    phase=RunPhase.MEASURING,
    elapsed_s=63.2,
    eta_s=34.0,
    num_requests=100,
    num_sent=69,
    num_completed=63,
    num_failed=1,
    in_flight=5,
    offered_qps=2.0,
    achieved_qps=1.93,
    latency_p50_s=0.812,
    latency_p90_s=1.42,
    latency_p99_s=2.03,
    lag_p99_s=0.0012,
    workers=(_WORKER,),
    recent_errors=(),
)


def worker(**changes: Any) -> WorkerProgress:
    return replace(_WORKER, **changes)


def workers(count: int) -> tuple[WorkerProgress, ...]:
    return tuple(worker(worker_id=n) for n in range(count))


def serve(**changes: Any) -> ServeProgress:
    return replace(_SERVE, **changes)


def run(**changes: Any) -> RunProgress:
    return replace(_RUN, **changes)


def trial(number: int, qps: float, verdict: Verdict = Verdict.PASS, **changes: Any) -> TrialProgress:
    value = None if verdict == Verdict.RUNNING else 2 * qps
    passed = {Verdict.PASS: True, Verdict.FAIL: False}.get(verdict)
    margin = None if value is None else (8.0 - value) / 8.0
    row = TrialProgress(number, qps, verdict, (RuleProgress(RULE, value, 8.0, "s", passed, margin),), "", False)
    return replace(row, **changes)


def search(**changes: Any) -> SearchProgress:
    """Two passes, a fail, and a trial running in the bracket."""
    base = SearchProgress(
        job="arxiv-llada",
        rules=(RULE,),
        elapsed_s=271.0,
        max_iterations=20,
        trials=(
            trial(1, 1.0, cached=True),
            trial(2, 2.0),
            trial(3, 8.0, Verdict.FAIL, reason="growth"),
            trial(4, 4.0, Verdict.RUNNING),
        ),
        highest_pass=2.0,
        lowest_fail=8.0,
        running=run(offered_qps=4.0),
    )
    return replace(base, **changes)


def lines(
    progress: Progress, width: int = 80, height: int = 23, glyphs: Glyphs = UNICODE, rates: RateTable = RATES
) -> list[str]:
    """The view as a terminal of that width shows it."""
    return printed(draw(progress, rates, Page(width, height, glyphs)), width)


def printed(drawn: Lines, width: int) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, _environ={})
    console.print(Text("\n").join(drawn), soft_wrap=True)
    return out.getvalue().removesuffix("\n").split("\n")


def view_text(progress: Progress, width: int = 80, height: int = 23, glyphs: Glyphs = UNICODE) -> str:
    return "\n".join(lines(progress, width, height, glyphs))
