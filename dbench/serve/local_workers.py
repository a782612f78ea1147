"""The worker processes that a server starts on its own machine: start, watch, and end, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence

from dbench.errors import ServerStartError
from dbench.serve import child
from dbench.serve.handover import WorkerConfig

MODULE = "dbench.serve.worker"
READ_BYTES = 65536
SIGNAL_TIMEOUT_S = 3.0
NORMAL_ENDING = "exit code 0"

logger = logging.getLogger(__name__)


class LocalWorker:
    """One worker, and the process that it has at a time; its standard error becomes log lines of this process."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.last_line = ""
        """The last message that its process wrote on standard error."""
        self.ending = ""
        """How its last process ended, in words."""
        self.is_unwanted = False
        """Its process has been told to end."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def device(self) -> str:
        return self._config.device

    @property
    def worker_id(self) -> int:
        return self._config.worker_id

    async def start(self) -> None:
        """Start a process; it dials the scheduler by itself. Raises ServerStartError.

        It gets its own session: Ctrl-C in the terminal is for the server, which drains its workers. It
        must be called from a thread that lives as long as the server (see child.die_with_parent_thread).
        """
        self.last_line = self.ending = ""
        self.is_unwanted = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                *child.command(MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self.ending = f"its process cannot be started: {error}"
            raise ServerStartError(f"worker {self.worker_id}: {self.ending}") from error
        assert self._process.stdin is not None, "the worker was started without a pipe"
        self._process.stdin.write(self._config.to_json().encode() + b"\n")  # and stays open: its end ends the worker

    async def wait(self) -> str:
        """Pass its lines on until it has ended; returns how it ended, in words."""
        process = self._process
        assert process is not None, "waiting for a worker that was not started"
        assert process.stderr is not None, "the worker was started without a pipe"
        buffer, level = b"", logging.INFO
        while chunk := await process.stderr.read(READ_BYTES):
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                level = self._pass_on(line, level)
        self._pass_on(buffer, level)
        code = await process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal that ends it, if it is still there."""
        self.is_unwanted = True
        if self._process is not None and self._process.returncode is None:
            try:
                os.kill(self._process.pid, number)  # Popen's own would take its end from those who wait for it
            except ProcessLookupError:
                logger.debug("worker %d has ended already", self.worker_id)

    def _pass_on(self, line: bytes, level_before: int) -> int:
        """Log a line with its own level, or, as a part of what was said before, with that one's; returns it."""
        given, message = child.read_log_line(line.decode(errors="replace").rstrip())
        level = level_before if given is None else given
        if message:
            self.last_line = message
            logger.log(level, "worker %d: %s", self.worker_id, message)
        return level


class LocalWorkers:
    """All local workers; `gone` is told of every process that ends, with how."""

    def __init__(self, configs: Sequence[WorkerConfig], gone: Callable[[int, str], None]) -> None:
        self.workers = [LocalWorker(config) for config in configs]
        self._gone = gone
        self._watches: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start all processes and watch them. Raises ServerStartError; call `end` in any case."""
        for worker in self.workers:
            await self.start_one(worker)

    async def start_one(self, worker: LocalWorker) -> None:
        """Start and watch a process for a worker that has none. Raises ServerStartError."""
        await worker.start()
        self._watches[worker.worker_id] = asyncio.create_task(self._watch(worker))

    async def kill_one(self, worker: LocalWorker) -> None:
        """Return when its process has ended; one that is stopped ends too."""
        worker.send(signal.SIGKILL)
        await asyncio.wait([self._watches[worker.worker_id]])

    async def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, at most so long."""
        watches = [self._watches[worker.worker_id] for worker in self._running()]
        if watches:
            await asyncio.wait(watches, timeout=timeout_s)

    async def end(self) -> None:
        """Return with none left: ask those that still run, and at last kill them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._running():
                logger.debug("worker %d still runs and gets %s", worker.worker_id, number.name)
                worker.send(number)
            await self.wait(SIGNAL_TIMEOUT_S)

    def kill(self, worker_ids: Sequence[int] | None = None) -> None:
        """End these, or all, at once, without waiting."""
        for worker in self.workers:
            if worker_ids is None or worker.worker_id in worker_ids:
                worker.send(signal.SIGKILL)

    async def first_ended(self) -> LocalWorker:
        """Wait until any of them has ended; for ever where there is none."""
        if not self.workers:
            await asyncio.Event().wait()
        while not (ended := [worker for worker in self.workers if worker not in self._running()]):
            await asyncio.wait(self._watches.values(), return_when=asyncio.FIRST_COMPLETED)
        return ended[0]

    async def _watch(self, worker: LocalWorker) -> None:
        worker.ending = await worker.wait()
        level = logging.DEBUG if worker.is_unwanted or worker.ending == NORMAL_ENDING else logging.WARNING
        logger.log(level, "worker %d ended: %s", worker.worker_id, worker.ending)
        self._gone(worker.worker_id, f"its process ended ({worker.ending})")

    def _running(self) -> list[LocalWorker]:
        return [w for w in self.workers if w.worker_id in self._watches and not self._watches[w.worker_id].done()]
