"""Look at the terminal views without a server: every figure here is INVENTED.

python tools/preview_console.py search --seconds 20
python tools/preview_console.py run --workers 8 --plain
python tools/preview_console.py serve --end exit        # does the terminal come back?
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dbench.console import Progress, View, install_logging, make_view
from dbench.progress import (
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

LOG = logging.getLogger("dbench.preview")
CAPACITY = 2.37
ADDRESS = "127.0.0.1:50051"
ERROR = "request 17 failed in block 3: logits are not finite; the worker went on with its other sequences (invented)"


@dataclass
class InventedServer:
    """Counters that grow as a server's would."""

    num_workers: int
    draw: random.Random
    tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def workers(self, load: float, seconds: float) -> tuple[WorkerProgress, ...]:
        """The workers after `seconds` more at a load between 0 and 1."""
        if not self.tokens:
            self.tokens, self.passes = [0] * self.num_workers, [0] * self.num_workers
        rows = []
        for i in range(self.num_workers):
            share = min(1.0, max(0.0, load + self.draw.gauss(0, 0.08)))
            steps = int(400 * share * seconds)
            self.passes[i] += steps
            self.tokens[i] += int(steps * self.draw.uniform(2.6, 3.4))
            state = "lost" if self.num_workers > 4 and i == 3 else "busy" if share > 0.1 else "idle"
            waiting = max(0, int((share - 0.8) * 60))
            active = int(128 * share)
            rows.append(
                WorkerProgress(
                    worker_id=i,
                    device=f"cuda:{i}",
                    state=state,
                    queue_depth_waiting=waiting,
                    queue_depth_active=active,
                    pages_used=int(8192 * share),
                    pages_total=8192,
                    num_forward_passes=self.passes[i],
                    num_unmasked_tokens=self.tokens[i],
                )
            )
        return tuple(rows)


def serve_snapshots(server: InventedServer, at: float, step: float) -> ServeProgress:
    load = 0.55 + 0.45 * math.sin(at / 6)
    done = int(at * 3.1)
    return ServeProgress(
        address=ADDRESS,
        model="invented/LLaDA-8B-Instruct",
        state=ServerState.READY if at > 2 else ServerState.STARTING,
        uptime_s=at,
        num_in_server=int(load * 40),
        num_pending=int(load * 4),
        num_completed=done,
        num_failed=done // 40,
        num_cancelled=done // 60,
        workers=server.workers(load, step) if at > 1 else (),
        recent_errors=(ERROR,) * (done // 40 > 0),
    )


def run_snapshot(server: InventedServer, at: float, step: float, *, qps: float, length: float) -> RunProgress:
    """A run at `at` seconds of the `length` that it takes."""
    share = at / length
    starts = {
        RunPhase.STARTING: 0.0,
        RunPhase.WARMUP: 0.05,
        RunPhase.MEASURING: 0.12,
        RunPhase.DRAINING: 0.85,
        RunPhase.EXPORTING: 0.96,
    }
    phase = [p for p, start in starts.items() if share >= start][-1]
    measured = min(1.0, max(0.0, (share - 0.12) / 0.84))
    done = int(200 * measured)
    slow = 1 / max(0.08, 1 - min(qps / CAPACITY, 0.92) ** 2)
    known = done > 3
    return RunProgress(
        name="invented-arxiv",
        target=ADDRESS,
        phase=phase,
        elapsed_s=at,
        eta_s=length - at if phase != RunPhase.STARTING else None,
        num_requests=200,
        num_sent=min(200, done + 9) if measured else 0,
        num_completed=done - done // 70,
        num_failed=done // 70,
        in_flight=min(9, 200 - done) if measured else 0,
        offered_qps=qps,
        achieved_qps=qps * min(1.0, measured * 4),
        latency_p50_s=0.7 * slow if known else None,
        latency_p90_s=1.9 * slow if known else None,
        latency_p99_s=3.1 * slow if known else None,
        lag_p99_s=0.0013 if known else None,
        workers=server.workers(min(1.0, qps / CAPACITY) if phase != RunPhase.STARTING else 0, step),
        recent_errors=(ERROR,) if done >= 70 else (),
    )


class InventedSearch:
    """Doubling, then bisection in log QPS, towards an invented capacity."""

    def __init__(self, server: InventedServer, rules: tuple[str, ...], trial_s: float) -> None:
        self._server = server
        self._rules = rules
        self._trial_s = trial_s
        self._trials: list[TrialProgress] = []
        self._low: float | None = None
        self._high: float | None = None
        self._started = 0.0
        self._qps = 0.25

    def snapshot(self, at: float, step: float) -> SearchProgress:
        if at - self._started >= self._trial_s:
            self._end_trial()
            self._started = at
        running = run_snapshot(self._server, at - self._started, step, qps=self._qps, length=self._trial_s)
        row = TrialProgress(len(self._trials) + 1, self._qps, Verdict.RUNNING, self._judge(None), "", False)
        return SearchProgress(
            job="invented-arxiv-llada8b",
            rules=self._rules,
            elapsed_s=at,
            max_iterations=20,
            trials=(*self._trials, row),
            highest_pass=self._low,
            lowest_fail=self._high,
            running=running,
        )

    def _judge(self, share: float | None) -> tuple[RuleProgress, ...]:
        thresholds = (8.0, 0.01, 2.0, 0.9)
        judged = []
        for n, (rule, limit) in enumerate(zip(self._rules, thresholds, strict=False)):
            unit = "s" if rule.endswith("s") else ""
            used = None if share is None else share * (1 - 0.1 * n)
            if used is None:
                judged.append(RuleProgress(rule, None, limit, unit, None, None))
            else:
                judged.append(RuleProgress(rule, limit * used, limit, unit, used <= 1, 1 - used))
        return tuple(judged)

    def _end_trial(self) -> None:
        passed = self._qps <= CAPACITY
        share = (self._qps / CAPACITY) ** 1.5
        reason = "" if passed else ("growth: latency rises through the run" if share > 1.5 else "SLA broken")
        verdict = Verdict.PASS if passed else Verdict.FAIL
        number = len(self._trials) + 1
        rules = self._judge(share)
        self._trials.append(TrialProgress(number, self._qps, verdict, rules, reason, number < 3))
        LOG.info("trial %d at %.3g QPS: %s (invented)", number, self._qps, verdict.value)
        if passed:
            self._low = self._qps
        else:
            self._high = self._qps
        self._qps = self._qps * 2 if self._high is None else math.sqrt((self._low or 0.1) * self._high)


def snapshots(arguments: argparse.Namespace) -> Iterator[Progress]:
    """Snapshots five times a second."""
    server = InventedServer(arguments.workers, random.Random(0))
    rules = ("request_e2e_time:p90<=8s", "error_rate<=0.01", "request_time_to_first_block:p90<=2s", "goodput<=0.9")
    search = InventedSearch(server, rules[: arguments.rules], arguments.trial_seconds)
    step = 0.2
    kinds: dict[str, Callable[[float], Progress]] = {
        "serve": lambda at: serve_snapshots(server, at, step),
        "run": lambda at: run_snapshot(server, at, step, qps=2.0, length=arguments.seconds),
        "search": lambda at: search.snapshot(at, step),
    }
    for n in range(int(arguments.seconds / step)):
        yield kinds[arguments.kind](n * step)
        time.sleep(step)


def show(view: View, arguments: argparse.Namespace) -> None:
    for n, progress in enumerate(snapshots(arguments)):
        view.update(progress)
        if arguments.logs and n % 20 == 10:
            LOG.info("an invented message of ordinary length")
        if arguments.logs and n % 60 == 30:
            LOG.warning("an invented warning, longer than a line of 80 columns: worker 1 was lost and starts again")
    if arguments.end == "error":
        raise RuntimeError("invented failure: the terminal must come back")
    if arguments.end == "exit":
        raise SystemExit(143)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a terminal view with invented figures.")
    parser.add_argument("kind", choices=("serve", "run", "search"))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--trial-seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rules", type=int, default=2, choices=range(5))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--logs", action="store_true", help="write log messages meanwhile")
    parser.add_argument("--end", choices=("normal", "error", "exit"), default="normal")
    arguments = parser.parse_args()
    print("preview: every figure below is invented", file=sys.stderr)
    view = make_view(dashboard=not arguments.plain)
    install_logging(view, "info")
    with view:
        show(view, arguments)


if __name__ == "__main__":
    main()
