"""What `dbench serve` leaves in its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from dbench.event_file import read_events
from dbench.events import ServerEnded, ServerStarted
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.wire import Submission
from tests.serve.process_builders import is_gone, wait_for
from tests.serve.server_builders import events_of, run

PATIENCE_S = 60
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DBENCH_")}
RESULTS = "benchmark_results.json"


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`dbench serve` with its folder, and its address; killed at the end if it still runs."""
    options = ("--scheduler-port", "0", "--base-worker-port", "0", "--max-model-len", "512", "--export-partial-metrics")
    process = subprocess.Popen(
        (sys.executable, "-m", "dbench", "serve", "embedded", *options, "--metrics-output-dir", str(folder)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def starting(folder: Path, said: IO[str]) -> subprocess.Popen[str]:
    """`dbench serve` whose workers have processes and are not ready; its standard error goes to `said`."""
    options = ("--gpus", "cpu,cpu", "--scheduler-port", "0", "--base-worker-port", "0", "--log-level", "debug")
    process = subprocess.Popen(
        (sys.executable, "-m", "dbench", "serve", "embedded", *options, "--metrics-output-dir", str(folder)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2)
    return process


def ended_by_sigterm(process: subprocess.Popen[str]) -> str:
    """What it still prints."""
    assert process.stdout is not None
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0
    wait_for(lambda: all(is_gone(child) for child in family))
    return rest


async def complete_one(address: str, *, then_export: bool) -> None:
    async with Client(address) as client:
        assert (await submit_and_wait(client, Submission((1, 2, 3), 32))).status == "COMPLETED"
        if then_export:
            assert await events_of(client)


def summary_in(folder: Path) -> dict[str, object]:
    summary = json.loads((folder / RESULTS).read_text())["summary"]
    assert isinstance(summary, dict)
    return summary


def test_an_export_writes_the_tables_while_the_server_runs_and_the_shutdown_none(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address):
        run(complete_one(address, then_export=True))
        wait_for((tmp_path / RESULTS).is_file)
        run(complete_one(address, then_export=False))
        printed = ended_by_sigterm(process)
    summary = summary_in(tmp_path)
    assert (summary["seen_from"], summary["reason"], summary["num_successful"]) == ("server", "open", 1)
    assert (tmp_path / "request_metrics.csv").is_file()
    assert (tmp_path / "worker_plots" / "queue_depth.png").is_file()
    assert printed == ""


def test_without_an_export_the_shutdown_writes_the_tables_of_a_server_that_ended(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address):
        run(complete_one(address, then_export=False))
        printed = ended_by_sigterm(process)
    summary = summary_in(tmp_path)
    assert (summary["reason"], summary["complete"], summary["lag"]) == ("ended", True, None)
    assert printed.startswith("server      ended\n")
    assert "send lag" not in printed
    with (tmp_path / "events.jsonl").open(encoding="utf-8") as lines:
        first, *_, last = read_events(lines)
    assert isinstance(first, ServerStarted)
    assert isinstance(last, ServerEnded)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_during_the_start_ends_it_without_talk_of_losses(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with (tmp_path / "said").open("w+") as said:
        process = starting(tmp_path / "serve", said)
        family = psutil.Process(process.pid).children()
        process.send_signal(number)
        printed, _ = process.communicate(timeout=PATIENCE_S)
        said.seek(0)
        lines = said.read().splitlines()
    assert process.returncode == code
    assert printed == ""
    assert all(is_gone(child) for child in family)
    assert [line for line in lines if "lost" in line or " warning " in line or " error " in line] == []
    assert [line for line in lines if "stopped while it was starting" in line] != []
    with (tmp_path / "serve" / "events.jsonl").open(encoding="utf-8") as file:
        assert [type(event) for event in read_events(file)] == [ServerStarted, ServerEnded]
