"""Errors in the plain view: each once, shortened, and counted when they come in storms."""

from __future__ import annotations

from tests.console_snapshots import run, serve
from tests.test_console_terminal import Plain


def test_errors_of_a_server_stand_in_its_log_and_are_not_said_twice() -> None:
    assert not any("error" in line for line in Plain().due(0.0, serve(recent_errors=("one",))))


def test_plain_counts_the_errors_of_a_storm() -> None:
    lines = Plain().due(0.0, run(recent_errors=tuple(f"e{n}" for n in range(10))))
    assert lines[:4] == ["error: e7", "error: e8", "error: e9", "error: and 7 more before these"]


def test_plain_cuts_a_long_error() -> None:
    (line, _) = Plain().due(0.0, run(recent_errors=("x" * 1000,)))
    assert line.endswith("x...")
    assert len(line) < 320
