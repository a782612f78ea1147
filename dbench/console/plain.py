"""The plain view: a line every few seconds and at each change, for logs, pipes and dumb terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, RLock, Thread
from types import TracebackType
from typing import Self

from rich.console import Console

from dbench.console.board import Board, Shown, workers_of
from dbench.console.look import NOTHING, Glyphs, clean, duration, elapsed, number, percent, print_lines, rate, share_of
from dbench.console.rates import RateTable
from dbench.console.run_view import finished_share
from dbench.console.trials import margin_text, value_text
from dbench.progress import (
    Progress,
    RunProgress,
    SearchProgress,
    ServeProgress,
    TrialProgress,
    Verdict,
    WorkerProgress,
)
from dbench.values import counted

INTERVAL_S = 5.0
ERROR_INTERVAL_S = 1.0
MAX_ERRORS = 3
MAX_ERROR_LENGTH = 300
LOOKS_PER_S = 10.0


class PlainView:
    """Prints lines from its own thread, so that a reader who does not read never stops the work."""

    is_live = False

    def __init__(self, console: Console, glyphs: Glyphs, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._glyphs = glyphs
        self._clock = clock
        self._board = Board(clock)
        self._lines = PlainLines(glyphs)
        self._screen = RLock()
        self._leave = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._look_often, name="view", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # the reader may be gone
            self._write(self._lines.rest(self._board.read()))

    def update(self, progress: Progress) -> None:
        self._board.post(progress)

    def print(self, text: str, style: str = "") -> None:
        with self._screen:
            print_lines(self._console, text, style, self._glyphs)

    def _look_often(self) -> None:
        while not self._leave.wait(1 / LOOKS_PER_S):
            try:
                self._write(self._lines.due(self._board.read(), self._clock()))
            except OSError:  # the reader is gone; the work goes on
                return

    def _write(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.print(f"{time.strftime('%H:%M:%S')} {line}")


class PlainLines:
    """Decides what a plain view says next; the clock is an argument."""

    def __init__(self, glyphs: Glyphs) -> None:
        self._glyphs = glyphs
        self._said: Progress | None = None
        self._said_at = float("-inf")
        self._stage: object = None
        self._errors: tuple[str, ...] = ()
        self._errors_at = float("-inf")
        self._ended: set[int] = set()

    def due(self, shown: Shown, now: float) -> list[str]:
        """New errors, trials that ended, and the state when it has changed its stage or is INTERVAL_S old."""
        if shown.progress is None:
            return []
        lines = self._trial_lines(shown.progress)
        if now - self._errors_at >= ERROR_INTERVAL_S and (errors := self._error_lines(shown.progress)):
            self._errors_at = now
            lines += errors
        stage = _stage(shown.progress)
        if stage != self._stage or (now - self._said_at >= INTERVAL_S and shown.progress is not self._said):
            self._stage, self._said, self._said_at = stage, shown.progress, now
            lines.append(state_line(shown.progress, shown.rates, self._glyphs))
        return lines

    def rest(self, shown: Shown) -> list[str]:
        """What has not been said yet, at the end."""
        if shown.progress is None:
            return []
        lines = [*self._trial_lines(shown.progress), *self._error_lines(shown.progress)]
        if shown.progress is not self._said:
            self._said = shown.progress
            lines.append(state_line(shown.progress, shown.rates, self._glyphs))
        return lines

    def _trial_lines(self, progress: Progress) -> list[str]:
        if not isinstance(progress, SearchProgress):
            return []
        ended = [t for t in progress.trials if t.verdict != Verdict.RUNNING and t.number not in self._ended]
        self._ended |= {t.number for t in ended}
        return [trial_line(t, self._glyphs) for t in ended]

    def _error_lines(self, progress: Progress) -> list[str]:
        errors = _errors_of(progress)
        new = _added(self._errors, errors)
        self._errors = errors
        lines = [f"error: {_cut(clean(e, self._glyphs))}" for e in new[-MAX_ERRORS:]]
        if len(new) > MAX_ERRORS:
            lines.append(f"error: and {len(new) - MAX_ERRORS} more before these")
        return lines


def state_line(progress: Progress, rates: RateTable, glyphs: Glyphs) -> str:
    """A snapshot in one line."""
    match progress:
        case ServeProgress():
            return _serve_line(progress, rates, glyphs)
        case RunProgress():
            return f"run {clean(progress.name, glyphs)}: {_run_text(progress)}{_workers_text(progress, rates)}"
        case SearchProgress():
            return _search_line(progress, glyphs)


def trial_line(trial: TrialProgress, glyphs: Glyphs) -> str:
    """A finished trial in one line."""
    parts = [f"trial {trial.number}: {rate(trial.qps)} QPS {trial.verdict.value.upper()}"]
    parts += [f"{clean(r.rule, glyphs)} {value_text(r)} ({margin_text(r)})" for r in trial.rules]
    parts += ["cached"] if trial.cached else []
    parts += [_cut(clean(trial.reason, glyphs))] if trial.reason else []
    return ", ".join(parts)


def _serve_line(p: ServeProgress, rates: RateTable, glyphs: Glyphs) -> str:
    return (
        f"serve {clean(p.model, glyphs)} at {clean(p.address, glyphs)}: {p.state}, "
        f"up {elapsed(p.uptime_s)}, {p.num_in_server} in server, {p.num_pending} pending, "
        f"{p.num_completed} completed, {p.num_failed} failed, {p.num_cancelled} cancelled{_workers_text(p, rates)}"
    )


def _run_text(p: RunProgress) -> str:
    finished = p.num_completed + p.num_failed
    figures = (
        ("p50", duration(p.latency_p50_s)),
        ("p90", duration(p.latency_p90_s)),
        ("p99", duration(p.latency_p99_s)),
        ("lag p99", duration(p.lag_p99_s)),
        ("ETA", elapsed(p.eta_s)),
    )
    known = "".join(f", {label} {value}" for label, value in figures if value != NOTHING)
    return (
        f"{p.phase.value} {elapsed(p.elapsed_s)}, {finished}/{p.num_requests} ({percent(finished_share(p))}), "
        f"{p.num_failed} failed, {p.in_flight} in flight, "
        f"QPS {number(p.achieved_qps)}{f' of {number(p.offered_qps)} offered' if p.offered_qps else ''}{known}"
    )


def _search_line(p: SearchProgress, glyphs: Glyphs) -> str:
    text = (
        f"search {clean(p.job, glyphs)}: {elapsed(p.elapsed_s)}, trials {len(p.trials)} of {p.max_iterations} at most, "
        f"highest pass {rate(p.highest_pass)}, lowest fail {rate(p.lowest_fail)} QPS"
    )
    if p.running is None:
        return text
    what = f"running at {rate(p.running.offered_qps)} QPS" if p.running.offered_qps else "probe"
    return f"{text}; {what}: {_run_text(p.running)}"


def _workers_text(progress: ServeProgress | RunProgress, rates: RateTable) -> str:
    workers = workers_of(progress)
    if not workers:
        return ""
    kv = share_of(sum(w.pages_used for w in workers), sum(w.pages_total for w in workers))
    speed, tpf = number(rates.total.tokens_per_s), number(rates.total.tokens_per_pass)
    return f", {speed} tokens/s, TPF {tpf}, KV use {percent(kv)}{_losses_text(workers)}"


def _losses_text(workers: Sequence[WorkerProgress]) -> str:
    """Who is away, and who came back."""
    losses = sum(w.num_losses for w in workers)
    away = sum(w.state == "lost" or (w.num_losses > 0 and w.state in ("starting", "awaited")) for w in workers)
    text = f", {counted(away, 'worker')} lost" if away else ""
    return text + (f", {counted(losses, 'loss', 'losses')} of workers so far" if losses > away else "")


def _stage(progress: Progress) -> object:
    """What makes a line worth printing at once when it changes."""
    match progress:
        case ServeProgress():
            return progress.state
        case RunProgress():
            return progress.phase
        case SearchProgress():
            return [t.number for t in progress.trials if t.verdict == Verdict.RUNNING], progress.running is None


def _errors_of(progress: Progress) -> tuple[str, ...]:
    """Those that nobody has told yet: a server's are lines of its own log."""
    match progress:
        case ServeProgress():
            return ()
        case RunProgress():
            return progress.recent_errors
        case SearchProgress():
            return progress.running.recent_errors if progress.running else ()


def _added(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    """The end of `after` that is new, when both are the last entries of one growing list."""
    for overlap in range(min(len(before), len(after)), 0, -1):
        if before[-overlap:] == after[:overlap]:
            return after[overlap:]
    return after


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ERROR_LENGTH else text[: MAX_ERROR_LENGTH - 3] + "..."
