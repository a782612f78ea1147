"""`dbench search-capacity`: plan, search, print what was found."""

from __future__ import annotations

import os

from dbench.cli_options import Invocation
from dbench.commands.common import open_view, print_json
from dbench.progress import Verdict
from dbench.report import write_report
from dbench.search.plan import plan_search
from dbench.search.results import JobResult, SearchResults
from dbench.search.server_runner import ServerRunner
from dbench.search.study import Tools, run_search

TITLE_WIDTH = 12


def search_command(invocation: Invocation) -> int:
    """Run what is missing of the search and print all of it."""
    plan = plan_search(invocation.flags, config_path=invocation.config, environment=os.environ)
    tools = Tools(runner=ServerRunner, report=write_report)
    with open_view(plan.jobs[0].options) as view:
        results = run_search(plan, tools, on_progress=view.update)
    if invocation.json:
        print_json(results.to_json())
    else:
        print("\n".join(result_lines(results)))
    return results.exit_code


def result_lines(results: SearchResults) -> list[str]:
    """Every job's answer, then where the files are."""
    lines = [line for job in results.jobs for line in (*_job_lines(job), "")]
    return [*lines, _row("files", str(results.folder))]


def _job_lines(job: JobResult) -> list[str]:
    lines = [_row("job", job.name), *(_row("sla" if n == 0 else "", rule) for n, rule in enumerate(job.rules))]
    if job.rules:
        lines.append(_row("capacity", _capacity(job)))
    bracket = job.bracket
    if bracket.highest_pass is not None or bracket.lowest_fail is not None:
        lines.append(
            _row("bracket", f"highest pass {_qps(bracket.highest_pass)}, lowest fail {_qps(bracket.lowest_fail)}")
        )
    if bracket.not_monotone:
        lines.append(_row("note", "not monotone: a rate passed above one that failed"))
    if job.binding_rule:
        lines.append(_row("limited by", job.binding_rule))
    how = (
        f"{len(job.trials)} of {job.num_requests} requests each, {sum(t.cached for t in job.trials)} from earlier runs"
    )
    lines.append(_row("trials", how))
    lines += [_row("", _trial(qps, verdict, reason)) for qps, verdict, reason in _trials(job)]
    lines.append(_row("stopped", job.error or job.reason.replace("_", " ")))
    return lines


def _capacity(job: JobResult) -> str:
    """With the number of requests that it rests on."""
    return "none found" if job.capacity is None else f"{_qps(job.capacity)} ({job.num_requests} requests per trial)"


def _trials(job: JobResult) -> list[tuple[float, Verdict, str]]:
    return [(trial.qps, trial.verdict, trial.reason) for trial in sorted(job.trials, key=lambda t: t.qps)]


def _trial(qps: float, verdict: Verdict, reason: str) -> str:
    return f"{qps:>10.4g} QPS  {verdict:<8}  {reason}".rstrip()


def _qps(qps: float | None) -> str:
    return "none" if qps is None else f"{qps:.4g} QPS"


def _row(title: str, text: str) -> str:
    return f"{title:<{TITLE_WIDTH}}{text}"
