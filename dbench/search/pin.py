"""Values that depend on the moment, kept for a job's whole life: its later trials must meet the same server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from dbench.config import AUTO_PREFIX
from dbench.result_files import write_json
from dbench.search.plan import Job

JOB_FILE = "job.json"

MOMENTARY = ("kv_max_pages",)
"""Options that dbench fills in from the free memory of the moment."""


def pinned(job: Job, job_folder: Path) -> Job:
    """The job with the values that its first command found; a value that was given is never changed."""
    options = job.options
    found = {name: options.value(name) for name in MOMENTARY if options.origins[name].startswith(AUTO_PREFIX)}
    kept = _first_record(job_folder / JOB_FILE, {"job_name": job.name, "job_key": job.key, "filled_in": found})
    for name, value in kept["filled_in"].items():
        options = options.replace(name, value, f"{AUTO_PREFIX}as in the first trial of this search")
    return replace(job, options=options)


def _first_record(path: Path, record: dict[str, object]) -> dict[str, dict[str, object]]:
    """What the first process wrote to `path`, this one if nobody was before it."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        write_json(draft, record)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    kept: dict[str, dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))
    return kept
