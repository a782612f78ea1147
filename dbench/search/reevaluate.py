"""The stored trials of a search, judged by other limits; runs nothing and changes no file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dbench.errors import UsageError
from dbench.progress import Verdict
from dbench.search.capacity import SearchSettings, Stop, next_step
from dbench.search.files import JOBS, RESULTS_NAME, SUMMARY_FILE
from dbench.search.objective import RUNS, judged, stored_runs
from dbench.search.results import REEVALUATED, JobResult, SearchResults
from dbench.search.sla import EXAMPLE, Rule


def reevaluate(folder: Path, rules: Sequence[Rule]) -> SearchResults:
    """Every job of a search's folder under `rules`. Raises UsageError when it is no such folder, or without rules."""
    if not rules:
        raise UsageError(f"--reevaluate: no limit to judge by; give --sla ({EXAMPLE})")
    summaries = sorted((folder / JOBS).glob(f"*/{SUMMARY_FILE}"))
    if not summaries:
        raise UsageError(f"--reevaluate: {folder} holds no search; give a folder with a {RESULTS_NAME}.json in it")
    return SearchResults(folder.name, folder, tuple(_judge_again(path, rules, folder) for path in summaries))


def _judge_again(summary_path: Path, rules: Sequence[Rule], folder: Path) -> JobResult:
    summary = json.loads(summary_path.read_text(encoding="utf-8"))
    runs = stored_runs(summary_path.parent / RUNS)
    trials = [replace(judged(number, run, rules, folder), cached=True) for number, run in enumerate(runs)]
    settings = SearchSettings(
        start_qps=summary["start_qps"],
        max_iterations=summary["max_iterations"],
        granularity_pct=summary["min_search_granularity_pct"],
        max_qps_cap=summary["max_qps_cap"],
        qps_list=tuple(summary["qps_list"]),
    )
    is_judged = any(trial.verdict is not Verdict.INVALID for trial in trials)
    step = next_step([t.tried() for t in trials], settings) if is_judged else None
    return JobResult(
        name=summary["job_name"],
        key=summary["job_key"],
        folder_name=summary_path.parent.name,
        rules=tuple(rule.text for rule in rules),
        settings=settings,
        num_requests=summary["num_requests_per_trial"],
        trials=tuple(trials),
        reason=str(step.reason) if isinstance(step, Stop) else REEVALUATED,
        answered_from_store=True,
    )
