"""Folders of a server alone, of several servers, and folders that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbench.errors import UsageError
from dbench.metrics import (
    load_run,
    request_table,
    summarize,
)
from tests.event_builders import (
    arrived,
    block,
    drawn,
    ended,
    finished,
    run_of,
    server_ended,
    server_started,
    started,
    write_run,
)


def test_a_folder_of_the_server_alone_counts_from_arrival_to_final_status() -> None:
    run = run_of(
        arrived("a", 0.0),
        block("a", 0, scheduler=(0.0, 0.0, 0.5), worker=(0, 0.1, 0.2, 0.2, 0.4), steps=((0.2, 1), (0.4, 3))),
        finished("a", 0.5),
        arrived("b", 0.2),
    )
    summary = summarize(run)
    assert (summary.seen_from, summary.num_successful, summary.num_unfinished) == ("server", 1, 1)
    assert request_table(run).iloc[0]["request_e2e_time"] == pytest.approx(0.5)
    assert request_table(run).iloc[0]["request_time_to_first_block"] == pytest.approx(0.5)


def test_a_server_that_ended_cleanly_was_not_killed_and_has_no_lag() -> None:
    summary = summarize(run_of(server_started(), arrived("a", 0.0), finished("a", 0.5), server_ended()))
    assert (summary.seen_from, summary.complete, summary.reason, summary.detail) == ("server", True, "ended", "")
    assert summary.lag is None


def test_a_server_without_requests_is_a_server() -> None:
    summary = summarize(run_of(server_started(), server_ended(reason="failed", detail="no model")))
    assert (summary.seen_from, summary.complete) == ("server", False)
    assert (summary.reason, summary.detail) == ("failed", "no model")


def test_a_server_without_a_last_line_may_still_run() -> None:
    assert summarize(run_of(server_started(), arrived("a"))).reason == "open"


def test_the_last_server_of_a_folder_counts() -> None:
    first = (server_started(-9.0), server_ended(-8.0))
    assert summarize(run_of(*first, server_started(-7.0), arrived("a"))).reason == "open"
    assert summarize(run_of(*first, server_started(-7.0), arrived("a"), server_ended(9.0))).reason == "ended"


def test_a_run_that_sent_nothing_does_not_count_the_requests_of_others() -> None:
    run = run_of(drawn(), arrived("a", 0.0), finished("a", 0.5), ended(0.6, "timeout"))
    summary = summarize(run)
    assert (summary.seen_from, summary.num_successful, summary.num_sent) == ("client", 0, 0)


def test_a_folder_without_events_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no events\.jsonl here"):
        load_run(tmp_path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, [started(1)], tail="{}\n" + "{}\n")
    with pytest.raises(UsageError, match=r"events\.jsonl: line 2: unknown event kind"):
        load_run(tmp_path)


def test_events_of_another_schema_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [started(1)])
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(text.replace('"schema_version":1', '"schema_version":7'))
    with pytest.raises(UsageError, match="events of schema 7"):
        load_run(folder)


@pytest.mark.parametrize(
    "tail", ['{"kind":"not_known_yet","at_s":1}\n' * 2, '{"kind":"run_ended","reason":1,"new":2}\n' * 2]
)
def test_events_of_another_schema_are_refused_as_such_whatever_else_is_new_in_them(tmp_path: Path, tail: str) -> None:
    folder = write_run(tmp_path, [started(1)], tail=tail)
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(text.replace('"schema_version":1', '"schema_version":7,"new":2'))
    with pytest.raises(UsageError, match="events of schema 7"):
        load_run(folder)


def test_a_time_that_is_no_number_is_damage_and_no_bug(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, [started(1)], tail='{"kind":"run_ended","at_s":null,"source":"client","reason":"complete"}\n'
    )
    with pytest.raises(UsageError, match="at_s is no number"):
        load_run(folder)
