"""The files of a search: results as JSON and CSV, a summary per job, and the figures.

capacity_search_results.json, .csv      every job
jobs/<name>_<key>/job_summary.json      one job
jobs/<name>_<key>/runs/<qps>/           its trials (see objective.py)
jobs/<name>_<key>/plots/                its figures, each beside the CSV that it draws
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dbench.events import SCHEMA_VERSION
from dbench.metrics import load_run, metric_values
from dbench.plots import AT_LEAST, Outcome, Title, TrialPoint, latency_cdfs, sla_metric_vs_qps
from dbench.progress import Verdict
from dbench.result_files import write_json, write_text
from dbench.search.results import JobResult, SearchResults, job_to_json
from dbench.search.sla import parse_rule
from dbench.search.space import qps_name
from dbench.search.store import StoredTrial
from dbench.search.stored import SUMMARY_FILE

RESULTS_NAME = "capacity_search_results"
JOBS = "jobs"
PLOTS = "plots"

CSV_COLUMNS = (
    "job_name",
    "job_key",
    "max_qps_under_sla",
    "num_trials",
    "error",
    "reason",
    "highest_pass",
    "lowest_fail",
    "binding_rule",
    "not_monotone",
    "num_requests_per_trial",
)
"""Each a key of job_to_json. Rates keep their digits: four decimals would blur a capacity of 0.00123."""


def write_results(results: SearchResults) -> None:
    """Replace the results by these, each file whole or not at all."""
    folder = results.folder
    write_json(folder / f"{RESULTS_NAME}.json", results.to_json())
    write_text(folder / f"{RESULTS_NAME}.csv", _csv(results))
    for job in results.jobs:
        write_json(folder / JOBS / job.folder_name / SUMMARY_FILE, job_to_json(job))


def _csv(results: SearchResults) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*CSV_COLUMNS, "schema_version"))
    for job in results.jobs:
        record = job_to_json(job)
        writer.writerow([*(_cell(record[name]) for name in CSV_COLUMNS), SCHEMA_VERSION])
    return text.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else value


def write_job_plots(results: SearchResults, job: JobResult) -> None:
    """Draw the job: per rule its value at every rate that was run, and the latencies on both sides of the capacity."""
    if not job.trials:
        return
    plots = results.folder / JOBS / job.folder_name / PLOTS
    for old in plots.glob("*"):  # of another SLA: they would speak of other limits
        old.unlink()
    rules = [parse_rule(text) for text in job.rules]
    outcome = Outcome(job.bracket.highest_pass, job.bracket.lowest_fail, job.capacity)
    about = f"{job.name} · {job.num_requests} requests per trial · {job.reason.replace('_', ' ')}"
    for rule in rules:
        points = [point for trial in job.trials if (point := _point(trial, rule.text)) is not None]
        if not points:
            continue
        stem = plots / f"{rule.subject.replace(':', '_')}_vs_qps"
        sla_metric_vs_qps(points, rule, outcome, stem, Title(f"{rule.subject} against the offered load", about))
    curves = {label: _latencies(results.folder / trial.run_dir) for label, trial in _compared(job).items()}
    limit = next((rule for rule in rules if rule.metric == "request_e2e_time"), None)
    if any(values.size for values in curves.values()):
        latency_cdfs(curves, limit, plots / "latency_cdfs", Title("End-to-end latency", about))


def _point(trial: StoredTrial, rule: str) -> TrialPoint | None:
    """The trial in the figure of a rule; None where it was stopped before it could say anything of it."""
    value = next((found.value for found in trial.rules if found.rule == rule), None)
    if value is None and trial.stopped_early:
        return None
    verdict = AT_LEAST if trial.stopped_early and trial.verdict is Verdict.FAIL else str(trial.verdict)
    return TrialPoint(trial.qps, math.inf if value is None else value, verdict)


def _compared(job: JobResult) -> dict[str, StoredTrial]:
    """Label -> trial: the last pass and the first fail, or every trial of a list without an SLA."""
    if not job.rules:
        return {f"{qps_name(t.qps)} QPS": t for t in job.trials}
    sides = (
        ("last pass", job.trial_at(job.bracket.highest_pass, Verdict.PASS)),
        ("first fail", job.trial_at(job.bracket.lowest_fail, Verdict.FAIL)),
    )
    return {
        f"{side}, {qps_name(trial.qps)} QPS{' (stopped early)' if trial.stopped_early else ''}": trial
        for side, trial in sides
        if trial is not None
    }


def _latencies(run_dir: Path) -> NDArray[np.float64]:
    """Of the judged requests; failed ones infinite."""
    return metric_values(load_run(run_dir), "request_e2e_time")
