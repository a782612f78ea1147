"""The log is on disk as it goes; the live figures follow the counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dbench.errors import RunCutShort, RunError
from dbench.events import RunEnded
from dbench.load.record import EventWriter, Tally
from dbench.progress import RunPhase
from tests.limits import largest_file
from tests.load.builders import events_of


def tally() -> Tally:
    return Tally(name="t", target="fake", num_requests=4, offered_qps=2.0)


def test_an_event_is_in_the_file_before_the_log_is_closed(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "deep" / "run") as log:
        log.write(RunEnded(1.0, "client", "complete"))
        assert events_of(tmp_path / "deep" / "run") == (RunEnded(1.0, "client", "complete"),)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        EventWriter(tmp_path / "file" / "run").__enter__()


def test_event_that_does_not_fit_ends_the_log_and_leaves_it_readable(tmp_path: Path) -> None:
    event = RunEnded(1.0, "client", "complete", "x" * 300)
    with EventWriter(tmp_path) as log:
        with largest_file(1000):
            log.write(event)
            log.write(event)
            with pytest.raises(RunCutShort, match=rf"^{tmp_path}/events.jsonl: no further event can be written \(File"):
                log.write(event)
        with pytest.raises(RunCutShort, match="dbench report"):  # a later line would stand behind a torn one
            log.write(RunEnded(2.0, "client", "complete"))
    assert events_of(tmp_path) == (event, event)


def test_live_percentiles_are_over_completed_requests() -> None:
    counts = tally()
    counts.begin(time.monotonic(), None)
    for latency_s in (4.0, 1.0, 3.0):
        counts.completed(latency_s)
    counts.failed("r: ERROR x")
    now = counts.progress()
    assert (now.latency_p50_s, now.latency_p90_s, now.latency_p99_s) == (3.0, 4.0, 4.0)
    assert (now.num_completed, now.num_failed) == (3, 1)


def test_there_are_no_percentiles_of_nothing() -> None:
    now = tally().progress()
    assert (now.latency_p50_s, now.lag_p99_s, now.eta_s) == (None, None, None)


def test_a_run_drains_once_its_last_measured_request_has_left() -> None:
    counts = tally()
    counts.begin(time.monotonic(), None)
    phases = []
    for _ in range(4):
        phases.append(counts.progress().phase)
        counts.sent(0.0)
    assert phases == [RunPhase.MEASURING] * 4
    assert counts.progress().phase is RunPhase.DRAINING


def test_only_the_latest_errors_are_kept() -> None:
    counts = tally()
    for number in range(9):
        counts.failed(f"r{number}")
    assert counts.progress().recent_errors == ("r4", "r5", "r6", "r7", "r8")
