"""The stored trials of a search, judged by other limits; runs nothing and changes no file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbench.errors import UsageError
from dbench.metrics import load_run
from dbench.progress import Verdict
from dbench.search.capacity import SearchSettings, Stop, next_step
from dbench.search.files import JOBS, RESULTS_NAME, SUMMARY_FILE
from dbench.search.objective import RUNS, rule_values, stored_runs
from dbench.search.results import REEVALUATED, JobResult, SearchResults
from dbench.search.sla import EXAMPLE, Rule
from dbench.search.store import StoredTrial
from dbench.search.verdict import TrialEnd, judge


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
    trials = [_judge_run(n, run_dir, record, rules, folder) for n, (run_dir, record) in enumerate(runs)]
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


def _judge_run(number: int, run_dir: Path, record: dict[str, Any], rules: Sequence[Rule], folder: Path) -> StoredTrial:
    end = TrialEnd(record["outcome"])
    judgement = judge(end, record["detail"], load_run(run_dir), rules)
    return StoredTrial(
        number=number,
        qps=record["qps"],
        verdict=judgement.verdict,
        reason=judgement.reason,
        rules=rule_values(judgement),
        hopeless=judgement.hopeless,
        timed_out=end is TrialEnd.TIMEOUT,
        cached=True,
        run_dir=run_dir.relative_to(folder).as_posix(),
        key=record["key"],
    )
