"""The commands against real servers: processes, ports, files and exit codes."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from dbench.event_file import read_events
from dbench.events import RequestDone, RequestSent, WorkerUp
from dbench.load.schedule import Stream
from dbench.load.traces import open_trace
from dbench.serve.client import Client
from tests.serve.process_builders import is_gone

COMMAND = (sys.executable, "-m", "dbench")
LIMITED = (
    "import resource, runpy, sys; limit = int(sys.argv.pop(1));"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)); runpy.run_module('dbench', run_name='__main__')"
)
PATIENCE_S = 120
SMALL_SERVER = ("--max-model-len", "512", "--log-level", "warning")
SMALL_LOAD = ("--trace", "arxiv", "--length-scale", "0.02", "--num-warmup-requests", "1", "--qps", "8")
LENGTHS_OF_SEED_42 = np.random.SeedSequence(42, spawn_key=(Stream.LENGTHS,))
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DBENCH_")}


def dbench(folder: Path, *arguments: str, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; with `largest_file`, files of more bytes are refused as on a full disk."""
    command = COMMAND if largest_file is None else (sys.executable, "-c", LIMITED, str(largest_file))
    return subprocess.run(
        (*command, *arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (*COMMAND, *arguments),
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def worker_pids(events: Path) -> list[int]:
    with events.open(encoding="utf-8") as lines:
        return [event.pid for event in read_events(lines) if isinstance(event, WorkerUp)]


def server_processes(process: psutil.Process) -> list[psutil.Process]:
    """The server that a command has started, once it is there."""
    found = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess):  # another child may end while we look
            if "dbench.serve.server" in child.cmdline():
                found.append(child)
    return found


def pages_used(address: str) -> int:
    """KV pages that the workers of a server hold."""

    async def ask() -> int:
        async with Client(address) as client:
            return sum(worker.pages_used for worker in (await client.status()).workers)

    return asyncio.run(ask())


@dataclass(frozen=True)
class Server:
    """A running `dbench serve`."""

    folder: Path
    address: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two CPU workers; at the end SIGTERM drains it and leaves no process behind."""
    folder = tmp_path_factory.mktemp("served")
    arguments = (
        "serve",
        "embedded",
        "--gpus",
        "cpu,cpu",
        "--scheduler-port",
        "0",
        "--base-worker-port",
        "0",
        *SMALL_SERVER,
    )
    children = []
    with start(folder, *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            answer = process.stdout.readline()
            assert answer.startswith("ready at 127.0.0.1:")
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 2
            yield Server(folder, answer.split()[-1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert all(is_gone(child) for child in children)
        finally:
            process.kill()
            for child in children:
                if not is_gone(child):
                    child.kill()


def test_submit_prints_the_answer_as_json_and_equal_requests_get_equal_answers(server: Server) -> None:
    arguments = ("submit", "--server", server.address, "--prompt-ids", "1,2,3", "--ignore-eos", "--json")
    first, second = (json.loads(dbench(server.folder, *arguments).stdout) for _ in range(2))
    assert first["status"] == "COMPLETED"
    assert len(first["token_ids"]) == 32
    assert first["num_forward_passes"] >= 1
    assert 0 < first["timings"]["server_s"] <= first["timings"]["latency_s"]
    assert first["token_ids"] == second["token_ids"]
    assert first["request_id"] != second["request_id"]


def test_streamed_text_is_the_text_of_the_answer(server: Server) -> None:
    arguments = (
        "submit",
        "--server",
        server.address,
        "--prompt",
        "Hello",
        "--gen-length",
        "96",
        "--request-seed",
        "-5",
    )
    streamed, whole = dbench(server.folder, *arguments, "--stream"), dbench(server.folder, *arguments)
    assert (streamed.returncode, whole.returncode) == (0, 0)
    assert streamed.stdout == whole.stdout != ""
    assert whole.stderr.startswith("COMPLETED: ")


def test_streamed_json_is_a_line_for_each_block_and_the_result_last(server: Server) -> None:
    arguments = ("submit", "--server", server.address, "--prompt-ids", "1,2,3", "--gen-length", "96", "--ignore-eos")
    *blocks, result = map(json.loads, dbench(server.folder, *arguments, "--stream", "--json").stdout.splitlines())
    assert [block["block_index"] for block in blocks] == [0, 1, 2]
    assert [token for block in blocks for token in block["token_ids"]] == result["token_ids"]
    assert (len(result["token_ids"]), result["status"]) == (96, "COMPLETED")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--gen-length", "33"), "33"),
        (("--prompt-ids", "1,99999"), "99999"),
        (("--gen-length", "4096"), "512"),
    ],
)
def test_request_that_the_server_refuses_is_one_line_and_exit_code_2(
    server: Server, arguments: tuple[str, ...], line: str
) -> None:
    prompt = () if "--prompt-ids" in arguments else ("--prompt", "Hello")
    done = dbench(server.folder, "submit", "--server", server.address, *prompt, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("dbench: error: ")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_attached_run_leaves_a_whole_report_that_can_be_made_again(server: Server) -> None:
    done = dbench(server.folder, "run", "--server", server.address, *SMALL_LOAD, "--num-requests", "8", "--json")
    assert done.returncode in (0, 1), done.stderr  # 1: this machine was too busy to send on time
    summary = json.loads(done.stdout)
    run_dir = server.folder / summary["run_dir"]
    assert (summary["reason"], summary["num_successful"], summary["workers_used"]) == ("complete", 8, [0, 1])
    with (run_dir / "request_metrics.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["COMPLETED"] * 8
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (config["server"], config["qps"]) == (server.address, 8.0)
    assert "block_length" not in config
    assert json.loads((run_dir / "server_config.json").read_text())["gpus"] == {"value": "cpu,cpu", "origin": "flag"}
    assert (run_dir / "server_environment.json").is_file()
    (run_dir / "request_metrics.csv").unlink()
    again = dbench(server.folder, "report", str(run_dir), "--json")
    assert {**json.loads(again.stdout), "run_dir": ""} == {**summary, "run_dir": ""}
    assert (run_dir / "request_metrics.csv").is_file()


def test_every_request_of_a_trace_completes_with_its_rounded_length_and_its_time_adds_up(server: Server) -> None:
    load = ("--trace", "arxiv", "--length-scale", "0.05", "--gen-scale", "0.15", "--qps", "4", "--num-requests", "12")
    one_token_per_step = ("--unmasking-strategy", "conf_quota", "--fixed-unmask-quota", "1")
    done = dbench(server.folder, "run", "--server", server.address, *load, *one_token_per_step, "--json")
    summary = json.loads(done.stdout)
    assert (summary["num_successful"], summary["num_failed"], summary["workers_used"]) == (12, 0, [0, 1])
    assert summary["unaccounted_share_p50"] < 0.05
    with (server.folder / summary["run_dir"] / "request_metrics.csv").open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["index"]))
    drawn = islice(open_trace("arxiv").pairs(np.random.default_rng(LENGTHS_OF_SEED_42), shuffle=True), 12)
    lengths = [32 * math.ceil(round(0.15 * pair.gen_len) / 32) for pair in drawn]
    assert [int(row["request_num_gen_tokens"]) for row in rows] == lengths
    assert summary["total_gen_tokens"] == sum(lengths)
    while pages_used(server.address):  # cancelled requests that came after the measured ones give theirs back too
        time.sleep(0.02)


def test_run_in_which_nothing_completes_exits_1_with_its_report(server: Server) -> None:
    arguments = ("--prompt-tokens", "500", "--gen-tokens", "32", "--max-total-tokens", "512", "--num-requests", "1")
    late = ("--benchmark-timeout", "0.000001", "--num-warmup-requests", "0")
    done = dbench(server.folder, "run", "--server", server.address, *arguments, *late, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["num_successful"] == 0


def test_full_disk_ends_a_run_with_its_summary_and_one_line(server: Server) -> None:
    arguments = ("run", "--server", server.address, *SMALL_LOAD, "--num-requests", "40", "--no-dashboard")
    done = dbench(server.folder, *arguments, largest_file=6_000)
    assert done.returncode == 1
    assert done.stdout.startswith("run         killed\nrequests ")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dbench: error: ")
    assert "events.jsonl: no further event can be written (File too large)" in last
    assert "internal error" not in done.stderr


def test_configuration_of_an_attached_run_can_be_run_again(server: Server) -> None:
    arguments = ("--server", server.address, *SMALL_LOAD, "--num-requests", "2", "--name", "first", "--json")
    first = json.loads(dbench(server.folder, "run", *arguments).stdout)
    config = str(server.folder / first["run_dir"] / "config.yaml")
    second = json.loads(dbench(server.folder, "run", "--config", config, "--json").stdout)
    assert second["run_dir"] != first["run_dir"]
    assert (second["lengths"], second["arrivals"]) == (first["lengths"], first["arrivals"])
    assert second["total_gen_tokens"] == first["total_gen_tokens"]


def test_server_writes_its_configuration_and_events(server: Server) -> None:
    (folder,) = (server.folder / "reports").glob("*-serve")
    assert yaml.safe_load((folder / "config.yaml").read_text())["gpus"] == "cpu,cpu"
    assert len(worker_pids(folder / "events.jsonl")) == 2


def has_measured(folder: Path) -> bool:
    """A request that is no warm-up has its result in the log of the run in this folder."""
    for path in folder.glob("*/events.jsonl"):
        with path.open(encoding="utf-8") as lines:
            events = list(read_events(lines))
        measured = {e.request_id for e in events if isinstance(e, RequestSent) and e.role == "measured"}
        return any(isinstance(e, RequestDone) and e.request_id in measured for e in events)
    return False


def test_interrupted_run_keeps_what_it_measured_and_leaves_no_process(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "run",
        *SMALL_SERVER,
        *SMALL_LOAD,
        "--num-requests",
        "2000",
        "--output-dir",
        str(tmp_path),
        "--name",
        "x",
    )
    try:
        while not has_measured(tmp_path):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert output.startswith("run         interrupted")
    (run_dir,) = tmp_path.glob("*-x")
    assert json.loads((run_dir / "benchmark_results.json").read_text())["summary"]["num_successful"] > 0
    assert [pid for pid in worker_pids(run_dir / "events.jsonl") if psutil.pid_exists(pid)] == []


def test_terminated_command_leaves_no_process_while_its_server_starts(tmp_path: Path) -> None:
    process = start(tmp_path, "run", *SMALL_SERVER, *SMALL_LOAD, "--output-dir", str(tmp_path), "--name", "x")
    me = psutil.Process(process.pid)
    try:
        while not (servers := server_processes(me)):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
    assert all(is_gone(server) for server in servers)
