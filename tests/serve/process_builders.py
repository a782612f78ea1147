"""Real server and worker processes on the embedded model, and the proof that none is left."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from dbench.options import ServiceOptions
from dbench.serve import child
from dbench.serve.handover import ServerConfig
from dbench.serve.launch import MODULE, ServerProcess
from tests.serve.server_builders import DEADLINE_S, options

INFO = 20


def launch(log_path: Path | None = None, **given: object) -> ServerProcess:
    engine, service, config_json = options(**given)
    return ServerProcess(engine, service, log_path=log_path, config_json=config_json)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds; fails after the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        time.sleep(0.02)


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    """It has ended; a zombie that nobody has waited for yet counts as ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between the two questions
        return True


def assert_all_end(processes: list[psutil.Process]) -> None:
    wait_for(lambda: all(is_gone(process) for process in processes))


@contextmanager
def server_child(service: ServiceOptions | None = None, **given: object) -> Iterator[subprocess.Popen[str]]:
    """`python -m dbench.serve.server` without a launcher around it; killed at the end if it still runs."""
    engine, own, config_json = options(**given)
    config = ServerConfig(engine, service or own, config_json, INFO)
    process = subprocess.Popen(
        child.command(MODULE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(config.to_json() + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def answer(process: subprocess.Popen[str]) -> dict[str, str]:
    """The one line that a server child says."""
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    assert isinstance(line, dict)
    return line
