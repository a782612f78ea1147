"""What a search's folder keeps of its jobs and their runs, as records.

A file that cannot be read ends in one line that says which, why, and what to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dbench.config import AUTO_PREFIX, Resolved
from dbench.errors import UsageError, one_line
from dbench.result_files import write_json
from dbench.search.capacity import SearchSettings
from dbench.search.verdict import TrialEnd

RUNS = "runs"
"""Folder of a job's trials."""
TRIAL_FILE = "trial_result.json"
"""Written last in a trial's folder: one without it is a run that something cut short, and no trial."""
SUMMARY_FILE = "job_summary.json"
PINNED_FILE = "job.json"

MOMENTARY = ("kv_max_pages",)
"""Options that dbench fills in from the free memory of the moment."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The run of a trial, to be judged now or by other rules later."""

    qps: float
    key: str
    end: TrialEnd
    detail: str
    """The one line that came with the end."""
    ended_unix_s: float
    run_dir: Path

    @classmethod
    def from_json(cls, record: Mapping[str, Any], run_dir: Path) -> StoredRun:
        """The inverse of `to_json`; further keys are passed over."""
        return cls(
            qps=float(record["qps"]),
            key=str(record["key"]),
            end=TrialEnd(record["outcome"]),
            detail=str(record["detail"]),
            ended_unix_s=float(record["ended_unix_s"]),
            run_dir=run_dir,
        )

    def to_json(self) -> dict[str, Any]:
        """Of trial_result.json."""
        return {
            "qps": self.qps,
            "key": self.key,
            "outcome": str(self.end),
            "detail": self.detail,
            "ended_unix_s": self.ended_unix_s,
        }


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What a job was asked to do."""

    name: str
    key: str
    num_requests: int
    settings: SearchSettings

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StoredJob:
        """From an entry of `jobs` in the results; further keys are passed over."""
        settings = SearchSettings(
            start_qps=record["start_qps"],
            max_iterations=int(record["max_iterations"]),
            granularity_pct=float(record["min_search_granularity_pct"]),
            max_qps_cap=record["max_qps_cap"],
            qps_list=tuple(record["qps_list"]),
        )
        return cls(str(record["job_name"]), str(record["job_key"]), int(record["num_requests_per_trial"]), settings)


def stored_runs(job_folder: Path) -> list[StoredRun]:
    """The runs of a job's trials, in the order they ended. Raises UsageError for a file that cannot be read."""
    runs = [
        _read(path, partial(StoredRun.from_json, run_dir=path.parent), _REMOVE_RUN)
        for path in (job_folder / RUNS).glob(f"*/{TRIAL_FILE}")
    ]
    return sorted(runs, key=lambda run: (run.ended_unix_s, run.run_dir.name))


def stored_job(job_folder: Path) -> StoredJob:
    """The summary of a job. Raises UsageError when it cannot be read."""
    return _read(job_folder / SUMMARY_FILE, StoredJob.from_json, _REMAKE_SUMMARY)


def pinned(options: Resolved, job_folder: Path) -> Resolved:
    """The options with the momentary values that a job's first command found: its later trials must meet the same
    server. A value that was given is never changed. Raises UsageError for a file that cannot be read.
    """
    found = {name: options.value(name) for name in MOMENTARY if options.origins[name].startswith(AUTO_PREFIX)}
    path = job_folder / PINNED_FILE
    _write_if_first(path, {"filled_in": found})
    for name, value in _read(path, lambda record: dict(record["filled_in"]), _REMOVE_JOB).items():
        options = options.replace(name, value, f"{AUTO_PREFIX}as in the first trial of this search")
    return options


def _write_if_first(path: Path, record: dict[str, object]) -> None:
    """Leave the file of whoever was first as it is; a reader never sees a part of one."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    write_json(draft, record)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


_REMOVE_RUN = "remove its folder, and the rate is run again"
_REMAKE_SUMMARY = "the command of the search writes it again"
_REMOVE_JOB = "remove the job's folder, and its trials are run again"


def _read(path: Path, parse: Callable[[dict[str, Any]], T], advice: str) -> T:
    """The record in a JSON file. Raises UsageError naming the file and `advice`."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        reason = f"it has no {error}"
    except (OSError, ValueError, TypeError) as error:
        reason = one_line(error)
    raise UsageError(f"{path}: cannot be read ({reason}); {advice}")
