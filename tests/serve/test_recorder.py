"""The recorder keeps a bounded number of events and says how many it forgot."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbench.errors import OptionError
from dbench.events import (
    SCHEMA_VERSION,
    Event,
    SchedulerDepth,
    ServerEnded,
    ServerStarted,
    WorkerLost,
    WorkerState,
    WorkerUp,
    event_from_json,
)
from dbench.serve import recorder as module
from dbench.serve.recorder import Recorder


def depth(number: int) -> SchedulerDepth:
    return SchedulerDepth(float(number), "scheduler", number, 0)


def up(worker_id: int) -> WorkerUp:
    return WorkerUp(1.0, "scheduler", worker_id, "cpu", 8, 16, 1)


def state(worker_id: int, at_s: float) -> WorkerState:
    return WorkerState(at_s, f"worker-{worker_id}", worker_id, "idle", 0, 0, 0, 0, 0, 8, 0)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder(None) as recorder:
        yield recorder


def exported(recorder: Recorder) -> list[Event]:
    return [event_from_json(line) for part in recorder.export() for line in part.lines]


def file_of(folder: Path) -> list[Event]:
    return [event_from_json(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_an_export_gives_what_was_recorded_in_order(recorder: Recorder) -> None:
    recorder.record([depth(1), depth(2)])
    recorder.record([depth(3)])
    assert exported(recorder) == [depth(1), depth(2), depth(3)]


def test_beyond_its_bound_the_oldest_are_forgotten_and_counted() -> None:
    with Recorder(None, max_events=2) as recorder:
        recorder.record(depth(number) for number in range(5))
        assert exported(recorder) == [depth(3), depth(4)]
        assert [part.num_forgotten for part in recorder.export()] == [3]


def test_an_export_comes_in_parts_of_bounded_size(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.record(depth(number) for number in range(7))
    monkeypatch.setattr(module, "MAX_BATCH_LINES", 3)
    assert [len(part.lines) for part in recorder.export()] == [3, 3, 1]
    monkeypatch.setattr(module, "MAX_BATCH_BYTES", 10)
    assert [len(part.lines) for part in recorder.export()] == [1] * 7


def test_an_empty_export_is_one_empty_part() -> None:
    assert [part.lines for part in Recorder(None).export()] == [()]


def test_a_reset_keeps_how_things_stand_at_that_moment(recorder: Recorder) -> None:
    recorder.record([up(0), up(1), depth(4), state(0, 2.0), state(1, 2.5), state(1, 3.0), depth(5)])
    recorder.record([WorkerLost(4.0, "scheduler", 0, "gone")])
    recorder.reset(9.0)
    kept = exported(recorder)
    assert {type(event) for event in kept} == {WorkerUp, WorkerState, SchedulerDepth}
    assert {event.at_s for event in kept} == {9.0}
    assert [event.worker_id for event in kept if isinstance(event, WorkerUp | WorkerState)] == [1, 1]
    assert [event.pending_requests for event in kept if isinstance(event, SchedulerDepth)] == [5]
    assert [part.num_forgotten for part in recorder.export()] == [0]


def test_the_file_begins_and_ends_with_the_server(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.record([depth(1)])
    first, *between, last = file_of(tmp_path)
    assert isinstance(first, ServerStarted)
    assert first.schema_version == SCHEMA_VERSION
    assert between == [depth(1)]
    assert isinstance(last, ServerEnded)
    assert (last.reason, last.detail) == ("ended", "")


def test_a_server_that_fails_says_so_in_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Recorder(tmp_path):
        raise RuntimeError("two\nlines")
    last = file_of(tmp_path)[-1]
    assert isinstance(last, ServerEnded)
    assert (last.reason, last.detail) == ("failed", "two lines")


def test_the_lines_of_the_file_alone_are_in_no_export(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.record([depth(1)])
        assert exported(recorder) == [depth(1)]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"metrics_output_dir .* cannot be written"):
        Recorder(tmp_path / "file" / "folder").__enter__()


def test_a_file_that_fails_ends_the_file_but_not_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "events.jsonl").symlink_to(full)
    with Recorder(tmp_path) as recorder:
        recorder.record([depth(1)])
        recorder.record([depth(2)])
        assert exported(recorder) == [depth(1), depth(2)]
    assert caplog.text.count("cannot be written any more") == 1


def test_events_that_find_no_disk_are_forgotten_until_a_reset(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/no/such/folder")
        recorder.record([depth(1)])
        recorder.record([depth(2), depth(3)])
    assert [(part.lines, part.num_forgotten) for part in recorder.export()] == [((), 3)]
    assert caplog.text.count("cannot be kept any more") == 1
    recorder.reset(9.0)
    recorder.record([depth(4)])
    assert [event.at_s for event in exported(recorder)] == [9.0, 4.0]
    assert [part.num_forgotten for part in recorder.export()] == [0]


def test_what_is_recorded_takes_no_memory(recorder: Recorder) -> None:
    recorder.record([depth(0)])
    tracemalloc.start()
    try:
        for number in range(2000):
            recorder.record([depth(number)])
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(exported(recorder)) == 2001
    assert grown_bytes < 20_000  # the lines alone have 200,000


def test_an_export_is_not_disturbed_by_what_is_recorded_meanwhile(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_LINES", 1)
    recorder.record([depth(1), depth(2)])
    parts = recorder.export()
    lines = [*next(parts).lines]
    recorder.record([depth(3)])
    recorder.reset(9.0)
    lines += [line for part in parts for line in part.lines]
    assert [event_from_json(line) for line in lines] == [depth(1), depth(2)]


def test_nothing_is_kept_once_the_server_has_ended(recorder: Recorder) -> None:
    recorder.__exit__(None, None, None)
    recorder.record([depth(1)])
    assert exported(recorder) == []
