"""A search's results for people: plain lines, or the same with colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dbench.progress import Verdict
from dbench.search.capacity import StopReason
from dbench.search.results import ERROR, INTERRUPTED, REEVALUATED, RUNNING, JobResult, SearchResults
from dbench.search.space import qps_name
from dbench.search.store import RuleValue, StoredTrial

if TYPE_CHECKING:
    from rich.text import Text

TITLE_WIDTH = 12
GAP = "  "

REASONS: dict[str, str] = {
    StopReason.BRACKET_CLOSED: "the bracket is as narrow as asked for",
    StopReason.CAP_REACHED: "it passed at max_qps_cap; the capacity may be higher",
    StopReason.MAX_ITERATIONS: "max_iterations reached before the bracket was as narrow as asked for; the same command "
    "with a higher --max-iterations goes on",
    StopReason.NO_PASS_IN_RANGE: "no rate that was tried meets the SLA",
    StopReason.INVALID_TRIALS: "the load generator could not keep its schedule, three times at one rate; "
    "give it more CPU",
    StopReason.LIST_DONE: "every rate of the list was run",
    ERROR: "an error ended the job",
    INTERRUPTED: "interrupted; the same command goes on where it stopped",
    RUNNING: "not over yet",
    REEVALUATED: "stored trials judged again; a search with this SLA would narrow the bracket",
}
"""Reason of a job -> a line for people."""

STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "red",
    Verdict.INVALID: "yellow",
    Verdict.UNJUDGED: "",
    Verdict.UNDECIDED: "yellow",
    Verdict.RUNNING: "",
}


def result_lines(results: SearchResults) -> list[str]:
    """The answer of every job, then where the files are; no escape codes."""
    return [line for line, _ in _styled(results)]


def result_text(results: SearchResults) -> Text:
    """The same for a rich console."""
    from rich.text import Text

    return Text("\n").join(Text(line, style=style) for line, style in _styled(results))


def _styled(results: SearchResults) -> Iterator[tuple[str, str]]:
    """Pairs of line and style."""
    for job in results.jobs:
        yield from _job(job)
        yield "", ""
    yield _row("files", str(results.folder)), ""


def _job(job: JobResult) -> Iterator[tuple[str, str]]:
    yield _row("job", job.name), "bold"
    for number, rule in enumerate(job.rules):
        yield _row("" if number else "SLA", rule), ""
    if job.error:
        yield _row("error", job.error), "red"
    if job.rules:
        yield _row("capacity", _capacity(job)), "bold green" if job.capacity is not None else "bold yellow"
        yield _row("bracket", _bracket(job)), ""
    if job.binding_rule:
        yield _row("limited by", job.binding_rule), ""
    yield _row("stopped", REASONS[job.reason]), ""
    yield _row("trials", _counts(job)), ""
    for line, trial in zip(_table(job.trials), (None, *job.trials), strict=False):
        yield GAP + line, STYLES[trial.verdict] if trial else "bold"
    if job.bracket.not_monotone:
        yield _row("note", "not monotone: some rate passed above one that failed"), "yellow"
    for note in dict.fromkeys(rule.note for trial in job.trials for rule in trial.rules if rule.note):
        yield _row("note", note), "yellow"


def _capacity(job: JobResult) -> str:
    if job.capacity is None:
        return "none found"
    return f"{qps_name(job.capacity)} QPS ({job.num_requests} requests per trial)"


def _bracket(job: JobResult) -> str:
    low, high = job.bracket.highest_pass, job.bracket.lowest_fail
    text = f"highest pass {_qps(low)}, lowest fail {_qps(high)}"
    return f"{text} (+{100 * (high / low - 1):.3g}%)" if low and high else text


def _counts(job: JobResult) -> str:
    text = str(len(job.trials))
    num_cached = sum(trial.cached for trial in job.trials)
    if job.reason == REEVALUATED or job.answered_from_store:
        return f"{text}; all stored, nothing was run"
    return f"{text}; {num_cached} from stored runs" if num_cached else text


def _table(trials: Sequence[StoredTrial]) -> list[str]:
    """Title and one line per trial, in columns."""
    if not trials:
        return []
    subjects = list(dict.fromkeys(rule.metric for trial in trials for rule in trial.rules))
    rows = [["QPS", "verdict", *(part for s in subjects for part in (s, "margin")), "reason"]]
    for trial in trials:
        by_subject = {rule.metric: rule for rule in trial.rules}
        cells = [part for s in subjects for part in _rule_cells(by_subject.get(s))]
        rows.append([qps_name(trial.qps), str(trial.verdict), *cells, _short_reason(trial)])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        GAP.join(
            cell.ljust(w) if n in (1, last) else cell.rjust(w)
            for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rule_cells(rule: RuleValue | None) -> tuple[str, str]:
    if rule is None:
        return "-", "-"
    margin = f"{100 * rule.margin:+.1f}%" if math.isfinite(rule.margin) else "-"
    return f"{rule.value:.4g}", margin


def _short_reason(trial: StoredTrial) -> str:
    """What the values do not say."""
    is_said_by_the_values = trial.verdict is Verdict.FAIL and any(not rule.passed for rule in trial.rules)
    reason = "" if is_said_by_the_values and not trial.timed_out else trial.reason
    if is_said_by_the_values and trial.stopped_early:
        reason = "stopped early"
    return ", ".join(filter(None, (reason, "cached" if trial.cached else "")))


def _qps(qps: float | None) -> str:
    return "none" if qps is None else f"{qps_name(qps)} QPS"


def _row(title: str, text: str) -> str:
    return f"{title:<{TITLE_WIDTH}}{text}"
