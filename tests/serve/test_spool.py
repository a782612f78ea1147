"""A spool keeps the last lines, in order, in files of which the oldest go first."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.serve import spool as module
from dbench.serve.spool import LineSpool

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12)


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many of the files that were opened from now on are still open."""
    real, files = tempfile.TemporaryFile, []

    def open_one(buffering: int) -> object:
        files.append(real(buffering=buffering))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", open_one)
    return lambda: sum(not file.closed for file in files)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "pwrite", disk.write)
    return disk


class Disk:
    """Takes `free_bytes`, then it is full."""

    def __init__(self) -> None:
        self.free_bytes = 1 << 30
        self._write = os.pwrite

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if not self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(fd, data[: self.free_bytes], offset)
        self.free_bytes -= done
        return done


@given(st.integers(1, 70), st.lists(st.lists(TEXT, max_size=40), max_size=12), st.integers(1, 30))
def test_it_keeps_the_last_lines_in_order_within_its_bound(
    max_lines: int, batches: list[list[str]], read_bytes: int
) -> None:
    taken: list[str] = []
    with pytest.MonkeyPatch.context() as patch, closing(LineSpool(max_lines)) as spool:
        patch.setattr(module, "READ_BYTES", read_bytes)
        for batch in batches:
            spool.append(batch)
            taken += batch
            kept = list(spool.lines())
            assert kept == taken[len(taken) - len(kept) :]
            assert (spool.num_lines, spool.num_taken) == (len(kept), len(taken))
            assert len(kept) <= max_lines
            assert len(kept) >= min(len(taken), max_lines * 3 // 4)


def test_an_iterator_gives_what_was_kept_when_it_began_whatever_comes_after() -> None:
    with closing(LineSpool(4)) as spool:
        spool.append(["a", "b", "c", "d"])
        lines = spool.lines()
        seen = [next(lines)]
        spool.append(["e", "f", "g", "h", "i"])
        assert list(spool.lines()) == ["f", "g", "h", "i"]
        spool.clear()
        spool.append(["j"])
        assert seen + list(lines) == ["a", "b", "c", "d"]


def test_files_are_opened_when_needed_and_closed_with_their_last_reader(open_files: Callable[[], int]) -> None:
    spool = LineSpool(3)
    spool.append([])
    assert open_files() == 0
    spool.append(["a", "b", "c", "d", "e"])
    assert open_files() == 3
    lines = spool.lines()
    next(lines)
    spool.append(["f"])
    assert open_files() == 4
    lines.close()
    assert open_files() == 3
    spool.close()
    assert open_files() == 0


def test_a_segment_is_also_full_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SEGMENT_BYTES", 10)
    with closing(LineSpool(160)) as spool:
        for number in range(40):
            spool.append([f"{number:09}"])
        assert list(spool.lines()) == [f"{number:09}" for number in range(24, 40)]


def test_a_full_disk_ends_the_keeping_but_loses_nothing_that_was_kept(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(LineSpool(100)) as spool:
        spool.append(["first", "second"])
        disk.free_bytes = 3
        spool.append(["third"])
        disk.free_bytes = 100
        spool.append(["fourth"])
        assert list(spool.lines()) == ["first", "second"]
        assert (spool.num_lines, spool.num_taken) == (2, 4)
    assert caplog.text.count("No space left on device") == 1


def test_after_a_clear_it_keeps_again(disk: Disk) -> None:
    with closing(LineSpool(100)) as spool:
        disk.free_bytes = 0
        spool.append(["lost"])
        disk.free_bytes = 100
        spool.clear()
        spool.append(["kept"])
        assert list(spool.lines()) == ["kept"]
        assert spool.num_taken == 1


def test_a_file_that_lost_its_end_is_an_error_and_no_short_answer() -> None:
    with closing(LineSpool(100)) as spool:
        spool.append(["first", "second"])
        lines = spool.lines()
        os.truncate(spool._segments[0].file.fileno(), 6)
        with pytest.raises(OSError, match="ends after 6 of 13 bytes"):
            list(lines)
