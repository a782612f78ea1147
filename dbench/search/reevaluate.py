"""The stored trials of a search, judged by other limits; runs nothing and changes no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dbench.errors import UsageError
from dbench.search.capacity import ANSWERS, Stop, next_step
from dbench.search.files import JOBS, RESULTS_NAME
from dbench.search.objective import judged
from dbench.search.results import REEVALUATED, JobResult, SearchResults
from dbench.search.sla import EXAMPLE, Rule
from dbench.search.stored import SUMMARY_FILE, stored_job, stored_runs


def reevaluate(folder: Path, rules: Sequence[Rule]) -> SearchResults:
    """Every job of a search's folder under `rules`.

    Raises UsageError when it is no such folder, without rules, and for a file that cannot be read.
    """
    if not rules:
        raise UsageError(f"--reevaluate: no limit to judge by; give --sla ({EXAMPLE})")
    summaries = sorted((folder / JOBS).glob(f"*/{SUMMARY_FILE}"))
    if not summaries:
        raise UsageError(f"--reevaluate: {folder} holds no search; give a folder with a {RESULTS_NAME}.json in it")
    return SearchResults(folder.name, folder, tuple(_judge_again(path.parent, rules, folder) for path in summaries))


def _judge_again(job_folder: Path, rules: Sequence[Rule], folder: Path) -> JobResult:
    job, runs = stored_job(job_folder), stored_runs(job_folder)
    trials = [replace(judged(number, run, rules, folder), cached=True) for number, run in enumerate(runs)]
    has_answers = any(trial.verdict in ANSWERS for trial in trials)
    step = next_step([t.tried() for t in trials], job.settings) if has_answers else None
    return JobResult(
        name=job.name,
        key=job.key,
        folder_name=job_folder.name,
        rules=tuple(rule.text for rule in rules),
        settings=job.settings,
        num_requests=job.num_requests,
        trials=tuple(trials),
        reason=str(step.reason) if isinstance(step, Stop) else REEVALUATED,
        answered_from_store=True,
    )
