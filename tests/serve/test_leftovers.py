"""The look for leftovers finds them: else a test that finds none would say nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.leftovers import Household

LISTEN = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True); sys.stdin.read()"
)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_a_process_and_its_port_are_found_while_they_are_there(tmp_path: Path, listener: subprocess.Popen[str]) -> None:
    household, port = Household(tmp_path), port_of(listener)
    assert household.left() == [f"port 127.0.0.1:{port}", f"process {listener.pid}"]
    listener.kill()
    listener.wait()
    assert household.left() == []


def test_a_port_is_found_that_somebody_else_has_inherited(tmp_path: Path, listener: subprocess.Popen[str]) -> None:
    household, port = Household(tmp_path), port_of(listener)
    household.look()
    listener.kill()
    listener.wait()
    with socket.create_server(("127.0.0.1", port)):
        assert household.left() == [f"port 127.0.0.1:{port}"]


def test_files_are_found_in_folders_too(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    assert Household(tmp_path).left() == ["file folder", "file folder/file"]
