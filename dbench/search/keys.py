"""Hashes of everything that a measurement depends on: equal keys mean that a stored run may stand for a new one.

The SLA is not in them: it judges a run and does not change it. Values that dbench fills in are not either,
for some follow from the free memory of the moment; what they are made from is.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dbench import __version__
from dbench.config import Resolved, options_to_dict
from dbench.environment import cpu_model
from dbench.load.traces import NAMED, traces_dir
from dbench.options import EngineOptions, LoadOptions, SamplingOptions, ServiceOptions
from dbench.serve.families import EMBEDDED, find_model

KEY_LENGTH = 12

NO_PART_OF_A_TRIAL = ("server", "tls_ca", "qps", "concurrency", "output_dir", "name")
"""Load options that say where a run goes, or that the search sets itself."""

SERVICE_PARTS = ("max_queued_requests",)
"""Service options that a measurement can depend on."""

MODEL_FILES = ("*.json", "*.safetensors")


def job_key(given: Resolved) -> str:
    """The key of a job, from its options as they were given."""
    return digest(
        {
            "dbench": __version__,
            "machine": _machine(),
            "engine": options_to_dict(given.section(EngineOptions)),
            "service": _part(options_to_dict(given.section(ServiceOptions)), SERVICE_PARTS),
            "sampling": options_to_dict(given.section(SamplingOptions)),
            "load": _without(options_to_dict(given.section(LoadOptions)), NO_PART_OF_A_TRIAL),
            "model": _files(find_model(given.section(EngineOptions).model or EMBEDDED)),
            "trace": _trace(given.section(LoadOptions).trace),
        }
    )


def trial_key(job: str, qps: float) -> str:
    """The key of one rate of a job."""
    return digest({"job": job, "qps": qps})


def digest(material: object) -> str:
    """A short hash of JSON values, whatever the order of their keys."""
    text = json.dumps(material, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def _part(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _machine() -> list[Any]:
    return [platform.machine(), cpu_model(), os.cpu_count()]


def _files(directory: Path) -> list[list[Any]]:
    """Name, size and time of change of a model's files: a new checkpoint in the same folder is another model."""
    files = sorted({path for pattern in MODEL_FILES for path in directory.glob(pattern)})
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _trace(name: str | None) -> str:
    """The content of the trace's file; the name of a trace that has none."""
    if name is None:
        return ""
    path = traces_dir() / f"{name}.quantiles.csv" if name in NAMED else Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name
