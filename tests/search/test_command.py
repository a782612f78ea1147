"""`dbench search-capacity` as a command: killed half way and repeated, and what it refuses before it starts."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest

from tests.serve.process_builders import assert_all_end, family_of
from tests.test_end_to_end import dbench, start

SEARCH = ("search-capacity", "--name", "x", "--start-qps", "8", "--max-iterations", "2")
SMALL = ("--prompt-tokens", "16", "--gen-tokens", "32", "--num-requests", "6", "--max-model-len", "512")
SLA = ("--sla", "request_e2e_time:p90<=100s")  # so slack that a busy machine's send lag is no matter
FILES_OF_A_RUN = ("events.jsonl", "config.yaml", "environment.json", "benchmark_results.json", "trial_result.json")


def finished_trials(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.glob("reports/search-x-*/jobs/*/runs/*/trial_result.json")}


def kill_after_the_first_trial(folder: Path) -> dict[Path, str]:
    """Start the search, kill it with SIGKILL in its second trial; returns the trials it had finished."""
    process = start(folder, *SEARCH, *SMALL, *SLA)
    try:
        while not finished_trials(folder):
            assert process.poll() is None
            time.sleep(0.02)
        family = family_of(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert_all_end(family)
    return finished_trials(folder)


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    before = kill_after_the_first_trial(tmp_path)
    assert len(before) == 1
    done = dbench(tmp_path, *SEARCH, *SMALL, *SLA, "--json")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert [(t["qps"], t["passed"]) for t in job["search_trace"]] == [(8, True), (16, True)]
    assert (job["max_qps_under_sla"], job["reason"], job["error"]) == (16, "max_iterations", "")
    after = finished_trials(tmp_path)
    assert len(after) == 2
    assert {path: after[path] for path in before} == before
    folder = Path(json.loads(done.stdout)["folder"])
    for trial in job["search_trace"]:
        assert all((tmp_path / folder / trial["run_dir"] / name).is_file() for name in FILES_OF_A_RUN)
    with (tmp_path / folder / "capacity_search_results.csv").open(newline="") as file:
        assert [row["max_qps_under_sla"] for row in csv.DictReader(file)] == ["16"]
    assert len(list((tmp_path / folder).glob("jobs/*/plots/*.png"))) == 3
    again = dbench(tmp_path, *SEARCH, *SMALL, *SLA)
    assert again.returncode == 0
    assert "capacity    16 QPS (6 requests per trial)" in again.stdout
    assert "all stored, nothing was run" in again.stdout
    assert finished_trials(tmp_path) == after


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--output-dir", "file"), "--output-dir: cannot make files in file/search-x-"),
        (("--output-dir", "/proc/nothing"), "--output-dir: cannot make files in /proc/nothing/search-x-"),
        (("--length-type", "trace"), "no trace is given"),
    ],
)
def test_what_cannot_be_searched_is_one_line_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    done = dbench(tmp_path, *SEARCH, *SMALL, *SLA, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dbench: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
