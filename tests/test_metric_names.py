"""The table of metrics and what is written about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dbench.metric_names import (
    BATCH_METRICS,
    BLOCK_METRICS,
    DEPTH_METRICS,
    REQUEST_METRICS,
    WORKER_METRICS,
    Metric,
    RequestMetric,
)
from dbench.metrics import batch_table, block_table, request_table, worker_summary
from tests.event_builders import run_of, simple_requests

DOCUMENT = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")

ALL: dict[str, Metric | RequestMetric] = {
    **REQUEST_METRICS,
    **BLOCK_METRICS,
    **BATCH_METRICS,
    **WORKER_METRICS,
    **DEPTH_METRICS,
}


@pytest.mark.parametrize("name", ALL)
def test_the_document_defines_the_metric_as_the_table_does(name: str) -> None:
    (row,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}` |")]
    assert ALL[name].definition in row


@pytest.mark.parametrize("name", REQUEST_METRICS)
def test_request_metrics_say_so_in_their_name(name: str) -> None:
    assert name.startswith("request_")


def test_every_table_has_the_columns_that_are_documented() -> None:
    run = run_of(*simple_requests([1.0]))
    assert REQUEST_METRICS.keys() <= set(request_table(run).columns)
    assert BLOCK_METRICS.keys() <= set(block_table(run).columns)
    assert BATCH_METRICS.keys() <= set(batch_table(run).columns)
    assert WORKER_METRICS.keys() <= set(worker_summary(run).columns)


def test_the_names_come_without_numpy() -> None:
    code = "import sys; import dbench.metric_names; print('numpy' in sys.modules or 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
