"""A server as a child process, for commands that measure one of their own."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

from dbench.errors import ServerStartError
from dbench.options import EngineOptions, ServiceOptions
from dbench.serve import child
from dbench.serve.handover import ServerConfig

MODULE = "dbench.serve.server"
EXIT_MARGIN_S = 20.0
"""Beyond drain_timeout_s, in which a server ends its workers."""
START_MARGIN_S = 30.0
"""Beyond startup_timeout_s, which the server itself watches."""
KILL_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class ServerProcess:
    """`with ServerProcess(...) as server:` runs a server at `server.address`, on any free port.

    It has its own session, so that Ctrl-C in the terminal reaches only the caller, who then leaves the
    block. It ends by itself, with its workers, when the caller dies.
    """

    def __init__(
        self, engine: EngineOptions, service: ServiceOptions, *, log_path: Path | None, config_json: str
    ) -> None:
        self._service = replace(service, scheduler_port=0, master_port=0, base_worker_port=0)
        level = logging.getLogger().getEffectiveLevel()
        level = level if log_path is None else min(level, logging.INFO)  # a file bothers nobody
        self._config = ServerConfig(engine, self._service, config_json, level)
        self._log_path = log_path
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        """host:port, once the block is entered."""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """0 before the block is entered."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> ServerProcess:
        """Wait until it is ready for requests. Raises ServerStartError, with nothing left running."""
        try:
            self._start()
            self.address = self._wait_for_address()
        except BaseException:
            self._stop(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop(at_once=False)

    def _start(self) -> None:
        with ExitStack() as files:
            log = None if self._log_path is None else files.enter_context(self._open_log(self._log_path))
            try:
                self._process = subprocess.Popen(
                    child.command(MODULE),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerStartError(f"the server process cannot be started: {error}") from error
        assert self._process.stdin is not None, "the server was started without a pipe"
        try:
            self._process.stdin.write(self._config.to_json() + "\n")
            self._process.stdin.flush()  # and stays open: its end ends the server
        except BrokenPipeError:
            logger.debug("the server ended before it read its configuration")

    def _open_log(self, path: Path) -> IO[str]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a", encoding="utf-8")
        except OSError as error:
            raise ServerStartError(f"{path}: the server's log cannot be written: {error.strerror}") from error

    def _wait_for_address(self) -> str:
        timeout_s = self._service.startup_timeout_s + START_MARGIN_S
        line = self._read_line(timeout_s)
        answer = json.loads(line) if line else {}
        if "address" in answer:
            return str(answer["address"])
        if "error" in answer:
            raise ServerStartError(str(answer["error"]))
        where = f"; see {self._log_path}" if self._log_path is not None else ""
        if line is None:
            raise ServerStartError(f"the server said nothing for {timeout_s:g} s{where}")
        assert self._process is not None, "waiting for a server that was not started"
        code = self._process.wait()
        raise ServerStartError(f"the server ended before it was ready, exit code {code}{where}")

    def _read_line(self, timeout_s: float) -> str | None:
        """The first line of the server's standard output, empty when it ended; None after the timeout."""
        assert self._process is not None, "reading from a server that was not started"
        output = self._process.stdout
        assert output is not None, "the server was started without a pipe"
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(output.readline()), name="server-answer", daemon=True)
        reader.start()
        reader.join(timeout_s)
        return lines[0] if lines else None

    def _stop(self, *, at_once: bool) -> None:
        """Let it drain, or not; returns when it has ended. A second Ctrl-C meanwhile ends it at once."""
        process = self._process
        if process is None:
            return
        try:
            if not at_once:
                process.send_signal(signal.SIGTERM)
                self._wait(process, self._service.drain_timeout_s + EXIT_MARGIN_S)
        finally:
            self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Interrupt what starts or drains, which ends it and its workers at once; kill what is then left."""
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            self._wait(process, KILL_TIMEOUT_S)
        finally:
            if process.poll() is None:
                logger.warning("the server (pid %d) did not end and is killed", process.pid)
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _wait(self, process: subprocess.Popen[str], timeout_s: float) -> None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the server (pid %d) has not ended within %g s", process.pid, timeout_s)
