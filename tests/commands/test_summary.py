"""What a run's summary says on stdout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dbench.cli import main
from dbench.commands.summary import print_summary, summary_lines
from dbench.measure.summary import RunSummary, summarize
from tests.event_builders import (
    arrived,
    done,
    drawn,
    ended,
    finished,
    run_of,
    sent,
    server_ended,
    server_started,
    simple_requests,
    started,
    worker_lost,
    worker_up,
    write_run,
)

FOLDER = Path("reports/x")


def summary_of_nothing() -> RunSummary:
    return summarize(run_of(started(), ended(reason="timeout", detail="not final 900 s after the last arrival")))


def test_run_without_figures_says_how_it_ended_and_where_its_files_are() -> None:
    lines = summary_lines(summary_of_nothing(), FOLDER)
    assert lines[0] == "run         timeout; not final 900 s after the last arrival"
    assert "requests    0 of 1 completed, 0 failed" in lines
    assert lines[-1] == "files       reports/x"
    assert not any("None" in line or "nan" in line for line in lines)


def test_run_that_ended_before_its_clock_started_sent_nothing() -> None:
    summary = summarize(run_of(drawn(), ended(reason="interrupted")))
    assert "requests    none was sent" in summary_lines(summary, FOLDER)


def test_json_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary_of_nothing(), FOLDER, as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert record["run_dir"] == "reports/x"
    assert (record["reason"], record["num_requests"], record["latency"]) == ("timeout", 1, None)


def test_complete_run_shows_latency_rate_tokens_lag_and_rule() -> None:
    events = [started(num_requests=4), drawn(notes=("lengths count another model's tokens",))]
    summary = summarize(run_of(*events, *simple_requests([0.5, 0.5, 0.5, 2.0]), ended()))
    lines = {line[:12].strip(): line[12:] for line in summary_lines(summary, FOLDER)}
    assert lines["run"].startswith("complete")
    assert lines["requests"] == "4 of 4 completed, 0 failed"
    assert lines["latency"].startswith("min 500.0 ms")
    assert lines["latency"].endswith("max 2.000 s")
    assert "2 offered" in lines["rate"]
    assert "generated" in lines["tokens"]
    assert lines["rule"] == "conf_threshold 0.9, temperature 0, end-of-text ids ignored"
    assert lines["note"] == "lengths count another model's tokens"


def test_a_worker_that_was_away_has_a_row() -> None:
    away = [worker_lost(2.0), worker_up(3.0), worker_lost(4.0), worker_up(5.25), worker_lost(6.0, 1)]
    events = [worker_up(), worker_up(worker_id=1), *simple_requests([1.0] * 5), *away]
    rows = [line for line in summary_lines(summarize(run_of(*events)), FOLDER) if line.startswith("workers")]
    assert rows == [
        "workers     worker 0 was lost 2 times, first at 2.0 s: its stream ended; back at 5.2 s",
        "workers     worker 1 was lost at 6.0 s: its stream ended; not back by the end",
    ]


def test_a_run_whose_workers_stayed_does_not_speak_of_them() -> None:
    lines = summary_lines(summarize(run_of(worker_up(), *simple_requests([1.0]))), FOLDER)
    assert not any(line.startswith("workers") for line in lines)


def test_load_row_counts_what_was_done_to_the_lengths() -> None:
    changed = drawn(num_rounded=3, num_shortened=2, num_repeated=1)
    (load,) = (
        line for line in summary_lines(summarize(run_of(started(4), changed)), FOLDER) if line.startswith("load")
    )
    assert load.endswith(
        "trace arxiv; gen lengths rounded up to whole blocks: 3; prompts shortened: 2; trace rows used again: 1"
    )
    (load,) = (
        line for line in summary_lines(summarize(run_of(started(4), drawn())), FOLDER) if line.startswith("load")
    )
    assert load.endswith("; trace arxiv")


def test_report_that_cannot_be_written_prints_its_summary_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", [drawn(), *simple_requests([0.5])])
    (run_dir / "benchmark_results.json").mkdir()
    assert main(["report", str(run_dir)]) == 1
    captured = capsys.readouterr()
    assert "requests    1 of 1 completed, 0 failed" in captured.out
    assert captured.err == (
        f"dbench: error: {run_dir}/benchmark_results.json: cannot be written (Is a directory); "
        "look at its folder's rights and free space\n"
    )


@pytest.mark.parametrize("width", [10, 40, 80])
def test_long_lines_go_on_under_their_text_and_tear_no_figure(width: int) -> None:
    events = [started(num_requests=4), drawn(num_rounded=3), *simple_requests([0.5, 0.25, 0.5, 2.0]), ended()]
    summary = summarize(run_of(*events))
    whole, broken = summary_lines(summary, FOLDER), summary_lines(summary, FOLDER, width)
    assert max(map(len, broken)) <= max(width, 12 + 20)
    assert [line for line in broken if line.endswith(" ") or re.search(r"^ *(ms|s)\b|\b(p50|max|mean)$", line)] == []
    words = " ".join(line.strip() for line in broken).split()
    assert words == " ".join(whole).split()
    assert all(line[:12].strip() or line.startswith(" " * 12) for line in broken)


def test_invalid_run_says_so_in_its_first_line() -> None:
    events = [started(num_requests=1), sent(lag=1.0), done(at=1.1), ended()]
    summary = summarize(run_of(*events))
    assert not summary.valid
    assert "INVALID: the load generator fell behind" in summary_lines(summary, FOLDER)[0]


def test_server_that_ended_shows_no_lag_and_no_run() -> None:
    summary = summarize(run_of(server_started(), arrived("a", 0.0), finished("a", 0.5), server_ended()))
    lines = summary_lines(summary, FOLDER)
    assert lines[0] == "server      ended"
    assert not any(line.startswith("send lag") for line in lines)


def test_server_that_may_still_run_is_not_called_killed() -> None:
    lines = summary_lines(summarize(run_of(server_started(), arrived("a"))), FOLDER)
    assert lines[0] == "server      still running when this was written, or killed"
