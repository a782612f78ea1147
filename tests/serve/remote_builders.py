"""`dbench worker` as a process, and servers at a port that is known beforehand."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dbench.options import ServiceOptions
from tests.serve.server_builders import WORKER_KEY, options

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DBENCH_")}
REMOTE = {"gpus": "none", "num_remote_workers": 1, "worker_key": WORKER_KEY}
"""A server all of whose workers come from elsewhere."""
END_TIMEOUT_S = 60
COMMAND = (sys.executable, "-m", "dbench", "worker", "--num-threads", "1")


class WorkerProcess:
    """One `dbench worker`; its standard error is in `log`."""

    def __init__(
        self,
        address: str,
        log: Path,
        *arguments: str,
        key: str = WORKER_KEY,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        self.log = log
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [*prefix, *COMMAND, "--scheduler", address, *arguments],
                env={**environment, "DBENCH_WORKER_KEY": key},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_ready(self) -> str:
        """What it prints then; empty when it ends instead."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def exit_code(self) -> int:
        """Wait for its end."""
        return self.process.wait(END_TIMEOUT_S)

    def last_line(self) -> str:
        return self.log.read_text().strip().rpartition("\n")[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def worker_process(address: str, folder: Path, *arguments: str, **given: Any) -> Iterator[WorkerProcess]:
    """Killed at the end if it still runs; `given` as of WorkerProcess."""
    number = len(list(folder.glob("worker-*.log")))
    worker = WorkerProcess(address, folder / f"worker-{number}.log", *arguments, **given)
    try:
        yield worker
    finally:
        worker.close()


def at_free_port(**given: object) -> ServiceOptions:
    """Service options with a port that is free now, for a server whose address others must know beforehand."""
    _, service, _ = options(**given)
    with socket.socket() as probe:
        probe.bind((service.host, 0))
        return replace(service, scheduler_port=probe.getsockname()[1])


def address_of(service: ServiceOptions) -> str:
    return f"{service.host}:{service.scheduler_port}"


def lines_with(path: Path, *words: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if all(word in line for word in words)]


def is_bindable(address: str) -> bool:
    """The port is free again."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
        return True


def names(paths: Sequence[Path]) -> list[str]:
    return sorted(path.name for path in paths)
