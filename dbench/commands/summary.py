"""A run's summary for people, and as JSON."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dbench.commands.common import print_json
from dbench.errors import RunError
from dbench.measure.intervals import Absence
from dbench.measure.summary import OPEN
from dbench.metrics import Distribution, RunSummary, load_run, summarize
from dbench.report import write_report
from dbench.values import counted

TITLE_WIDTH = 12
SHORTEST_LINE = 20
TIE = "\N{NO-BREAK SPACE}"
"""Within a figure; becomes a plain space once lines are broken."""

_WRITERS = {"client": "run", "server": "server"}
"""RunSummary.seen_from -> what has ended."""

_REASONS = {OPEN: "still running when this was written, or killed"}
"""Reasons that a reader would not understand, in words."""


def print_summary(summary: RunSummary, folder: Path, *, as_json: bool) -> None:
    """The results on stdout."""
    if as_json:
        print_json({"run_dir": str(folder), **asdict(summary)})
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(summary_lines(summary, folder, width)))


def report_run(folder: Path, *, as_json: bool) -> RunSummary:
    """Write the run's tables and figures and print its summary, which is printed also where they cannot be written."""
    try:
        summary = write_report(folder)
    except RunError:
        print_summary(summarize(load_run(folder)), folder, as_json=as_json)
        raise
    print_summary(summary, folder, as_json=as_json)
    return summary


def summary_lines(summary: RunSummary, folder: Path, width: int | None = None) -> list[str]:
    """One figure or group of figures per line; what the run has no figure for is left out.

    With a width, longer lines are continued under their own text; a figure is never torn from its name and unit.
    """
    rows = [
        (_WRITERS[summary.seen_from], _ending(summary)),
        ("requests", _requests(summary)),
        ("latency", _distribution(summary.latency)),
        ("first block", _distribution(summary.time_to_first_block)),
        ("rate", _rates(summary)),
        ("tokens", _tokens(summary)),
        ("answers", _answers(summary)),
        ("send lag", _distribution(summary.lag)),
        *(("workers", text) for text in _workers_lost(summary)),
        ("load", "; ".join(part for part in (summary.arrivals, summary.lengths, *_changes(summary)) if part)),
        ("rule", _rule(summary)),
        *(("note", note) for note in summary.notes),
        ("files", str(folder)),
    ]
    return [line.replace(TIE, " ") for title, text in rows if text for line in _lines_of(title, text, width)]


def _lines_of(title: str, text: str, width: int | None) -> list[str]:
    if width is None:
        return [f"{title:<{TITLE_WIDTH}}{text}"]
    room = max(width - TITLE_WIDTH, SHORTEST_LINE)
    first, *rest = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return [f"{title:<{TITLE_WIDTH}}{first}", *(" " * TITLE_WIDTH + part for part in rest)]


def _ending(summary: RunSummary) -> str:
    parts = [_REASONS.get(summary.reason, summary.reason)]
    if summary.detail:
        parts.append(summary.detail)
    if not summary.valid:
        parts.append(f"INVALID: {summary.invalid_reason}")
    return "; ".join(parts)


def _requests(summary: RunSummary) -> str:
    if summary.num_requests == 0:
        return "none was sent"
    text = f"{summary.num_successful} of {summary.num_requests} completed, {summary.num_failed} failed"
    if summary.num_unfinished:
        text += f", {summary.num_unfinished} without an end"
    if summary.num_block_retries:
        text += f", {counted(summary.num_block_retries, 'block')} tried again"
    return text


def _workers_lost(summary: RunSummary) -> list[str]:
    """A line for each worker that was away: how often, when first and why, and when it was back for good."""
    by_worker: dict[int, list[Absence]] = {}
    for absence in summary.workers_lost:
        by_worker.setdefault(absence.worker_id, []).append(absence)
    return [_absences(own) for _, own in sorted(by_worker.items())]


def _absences(own: Sequence[Absence]) -> str:
    first, last = own[0], own[-1]
    times = "was lost" if len(own) == 1 else f"was lost {len(own)} times, first"
    back = "not back by the end" if last.end_time is None else f"back at {last.end_time:.1f}{TIE}s"
    return f"worker {first.worker_id} {times} at {first.start_time:.1f}{TIE}s: {first.reason}; {back}"


def _distribution(seconds: Distribution | None) -> str:
    if seconds is None:
        return ""
    return "  ".join(f"{name}{TIE}{_seconds(value)}" for name, value in asdict(seconds).items())


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f}{TIE}ms" if abs(value) < 1 else f"{value:.3f}{TIE}s"


def _rates(summary: RunSummary) -> str:
    parts = []
    if summary.achieved_qps is not None:
        parts.append(f"{summary.achieved_qps:.3g} requests/s completed")
    if summary.offered_qps is not None:
        offered = summary.offered_qps
        loop = "closed loop" if offered == 0 else "all at once" if math.isinf(offered) else f"{offered:.4g} offered"
        parts.append(loop)
    if summary.wall_clock_time is not None:
        parts.append(f"{summary.wall_clock_time:.1f} s in all")
    return ", ".join(parts)


def _tokens(summary: RunSummary) -> str:
    parts = [f"{summary.total_gen_tokens} generated"]
    if summary.tokens_per_sec is not None:
        parts.append(f"{summary.tokens_per_sec:.1f} per second")
    if summary.tokens_per_forward_pass is not None:
        parts.append(f"{summary.tokens_per_forward_pass:.2f} per forward pass")
    return ", ".join(parts)


def _answers(summary: RunSummary) -> str:
    """How many were right, in all and of each kind."""
    if summary.answers is None:
        return ""
    score = summary.answers
    text = f"{score.accuracy:.1%} right ({score.num_right} of {score.num_asked}"
    text += ", failed ones count as wrong)" if summary.num_successful < score.num_asked else ")"
    tasks = (f"{name} {of.num_right}/{of.num_asked}" for name, of in summary.answers_by_task.items())
    return f"{text}: {', '.join(tasks)}"


def _changes(summary: RunSummary) -> list[str]:
    """What was done to the lengths of the trace or the options before they were sent."""
    counts = (
        ("gen lengths rounded up to whole blocks", summary.num_rounded),
        ("prompts shortened", summary.num_shortened),
        ("trace rows used again", summary.num_repeated),
    )
    return [f"{what}: {count}" for what, count in counts if count]


def _rule(summary: RunSummary) -> str:
    if not summary.rule:
        return ""
    ends = {True: "end-of-text ids ignored", False: "ends at end of text", None: ""}[summary.ignore_eos]
    return ", ".join(part for part in (summary.rule, ends) if part)
