"""A run's folder becomes results, tables and figures."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from dbench.errors import RunError, UsageError
from dbench.events import Event
from dbench.report import run_title, write_report
from tests.event_builders import (
    batch,
    block,
    done,
    drawn,
    ended,
    run_of,
    sent,
    simple_requests,
    started,
    state,
    worker_up,
    write_run,
)

TABLES = {"request_metrics.csv", "block_metrics.csv", "worker_summary.csv", "worker_timeline.csv"}
FIGURES = {
    "request_plots/latency_cdf",
    "request_plots/request_time_to_first_block_cdf",
    "request_plots/request_time_between_tokens_cdf",
    "request_plots/request_tokens_unmasked_per_forward_pass_cdf",
    "request_plots/arrivals_and_completions",
    "worker_plots/queue_depth",
    "worker_plots/kv_page_utilization_ratio",
    "worker_plots/utilization",
}

RUN: list[Event] = [
    drawn(num_rounded=2),
    started(2, float("inf")),
    worker_up(),
    sent("a", 0, lag=0.001),
    sent("b", 1, intended=0.5, lag=0.001),
    done("a", 1.0, first_block=1.0),
    done("b", 1.5, status="ERROR"),
    block("a", 0, scheduler=(0.01, 0.01, 0.9), worker=(0.02, 0.1, 0.2, 0.2, 0.9), steps=((0.2, 1), (0.9, 3))),
    state(0.02, "queued", waiting=1),
    state(0.1, "busy", active=1, pages_used=4),
    state(0.9, "idle"),
    batch(0.1, 0.2, prompt_len=14),
    batch(0.2, 0.9, gen_len=4),
    ended(),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = write_run(tmp_path_factory.mktemp("reports") / "run", RUN)
    (run_dir / "config.yaml").write_text("served_model_name: embedded  # default\n", encoding="utf-8")
    write_report(run_dir)
    return run_dir


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_there_and_nothing_else(folder: Path) -> None:
    figures = {f"{stem}.{kind}" for stem in FIGURES for kind in ("csv", "png")}
    assert names(folder) == TABLES | figures | {"events.jsonl", "config.yaml", "benchmark_results.json"}


def test_every_csv_ends_with_the_schema_version(folder: Path) -> None:
    for path in folder.rglob("*.csv"):
        with path.open() as file:
            header, *rows = csv.reader(file)
        assert header[-1] == "schema_version", path
        assert rows, path
        assert {row[-1] for row in rows} == {"1"}, path


def test_csv_values_have_four_decimals_and_counts_none(folder: Path) -> None:
    with (folder / "request_metrics.csv").open() as file:
        row = next(csv.DictReader(file))
    assert row["request_e2e_time"] == "1.0000"
    assert row["request_client_lag"] == "0.0010"
    assert row["request_num_gen_tokens"] == "4"


def test_a_failed_request_has_empty_cells_and_its_error(folder: Path) -> None:
    table = pd.read_csv(folder / "request_metrics.csv")
    failed = table[table["request_id"] == "b"].iloc[0]
    assert (failed["status"], failed["error"]) == ("ERROR", "request b was lost")
    assert pd.isna(failed["request_e2e_time"])


def test_the_results_are_strict_json_with_version_summary_workers_and_requests(folder: Path) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / "benchmark_results.json").read_text()
    results = json.loads(text, parse_constant=refuse)
    assert list(results) == ["schema_version", "summary", "workers", "requests"]
    assert results["schema_version"] == 1
    assert results["summary"]["num_successful"] == 1
    assert results["summary"]["offered_qps"] == "inf"
    assert results["summary"]["latency"]["p90"] == pytest.approx(1.0)
    assert results["summary"]["num_rounded"] == 2
    assert [worker["worker_id"] for worker in results["workers"]] == [0]
    assert [request["request_e2e_time"] for request in results["requests"]] == [pytest.approx(1.0), None]
    assert [request["request_num_gen_tokens"] for request in results["requests"]] == [4, None]


def test_every_request_stands_on_a_line_of_its_own_in_the_results(folder: Path) -> None:
    lines = (folder / "benchmark_results.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["request_id"] for line in lines if "request_id" in line] == ["a", "b"]


def test_figures_are_png_files(folder: Path) -> None:
    for stem in FIGURES:
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_example_is_what_its_events_give(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "reports" / "example"
    folder = tmp_path / "example"
    shutil.copytree(example, folder)
    write_report(folder)
    for kept in sorted(path for path in example.rglob("*") if path.suffix in (".csv", ".json")):
        assert (folder / kept.relative_to(example)).read_text() == kept.read_text(), kept.name


def test_a_second_report_writes_the_same_files_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path, RUN)
    write_report(folder)
    before = {name: (folder / name).read_bytes() for name in names(folder)}
    write_report(folder)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == before


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        ("enable_individual_batch_metrics: true\n", None, True),
        ("enable_individual_batch_metrics: false\n", None, False),
        ("", True, True),
        ("enable_individual_batch_metrics: true\n", False, False),
    ],
)
def test_batches_are_written_when_the_run_or_the_caller_asks(
    tmp_path: Path, config: str, asked: bool | None, expected: bool
) -> None:
    folder = write_run(tmp_path, RUN)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    write_report(folder, with_batches=asked)
    path = folder / "worker_batch_metrics.csv"
    assert path.exists() is expected
    if expected:
        assert list(pd.read_csv(path)["batch_phase"]) == ["prefill", "decode"]


def test_a_killed_run_gets_tables_for_what_exists(tmp_path: Path) -> None:
    events = [drawn(), started(5), sent("a"), sent("b", 1, intended=0.5), done("a", 1.0, first_block=0.7)]
    folder = write_run(tmp_path, events, tail='{"kind":"request_do')
    summary = write_report(folder)
    assert (summary.reason, summary.num_successful, summary.num_unfinished) == ("killed", 1, 1)
    assert len(pd.read_csv(folder / "request_metrics.csv")) == 2
    assert list(pd.read_csv(folder / "worker_timeline.csv").columns)[-1] == "schema_version"
    assert names(folder) >= {f"{stem}.png" for stem in FIGURES}


@pytest.mark.parametrize("events", [[], [started(3)], [drawn(), started(3), ended(0.0, "interrupted")]])
def test_a_run_without_requests_still_has_a_report(tmp_path: Path, events: list[Event]) -> None:
    folder = write_run(tmp_path, events)
    assert write_report(folder).num_successful == 0
    assert names(folder) >= TABLES


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, RUN)
    (folder / "request_plots").touch()
    with pytest.raises(RunError, match=r"request_plots/latency_cdf.csv: cannot be written \(File exists\)"):
        write_report(folder)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (b"model: [embedded\n", "config.yaml line 2: not valid YAML"),
        (b"- model\n", "config.yaml: got a list"),
        (b"\xff\xfe", "config.yaml: cannot be read: not UTF-8 text"),
    ],
)
def test_a_broken_configuration_costs_the_report_a_warning(
    tmp_path: Path, config: bytes, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, RUN)
    (folder / "config.yaml").write_bytes(config)
    assert write_report(folder).num_successful == 1
    (warning,) = caplog.messages
    assert line in warning
    assert names(folder) >= TABLES


def test_a_folder_without_events_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give the folder of a run"):
        write_report(tmp_path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(("qps", "rate"), [(2.0, "2 QPS offered"), (0.0, "closed loop"), (float("inf"), "all at once")])
def test_the_title_says_model_trace_and_rate(qps: float, rate: str) -> None:
    run = run_of(drawn(), started(40, qps))
    config = {"served_model_name": None, "model": "/models/LLaDA-8B-Instruct"}
    assert run_title(run, config) == f"LLaDA-8B-Instruct · arxiv · {rate} · 40 requests"


def test_the_title_leaves_out_what_is_not_known() -> None:
    assert run_title(run_of(*simple_requests([1.0])), {}) == "2 QPS offered · 1 request"
