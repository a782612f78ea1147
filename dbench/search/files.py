"""The files of a search: results as JSON and CSV, a summary per job, and the figures.

capacity_search_results.json, .csv      every job
jobs/<name>_<key>/job_summary.json      one job
jobs/<name>_<key>/runs/<qps>/           its trials (see objective.py)
jobs/<name>_<key>/plots/                its figures, each beside the CSV that it draws
"""

from __future__ import annotations

import csv
import io

from dbench.events import SCHEMA_VERSION
from dbench.result_files import write_json, write_text
from dbench.search.results import JobResult, SearchResults, job_to_json

RESULTS_NAME = "capacity_search_results"
SUMMARY_FILE = "job_summary.json"
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
    """Draw the job's trials."""
