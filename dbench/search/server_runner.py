"""Trials against a real server: one per job, started for its first run and kept until it is lost or the job ends."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import ExitStack, aclosing
from dataclasses import asdict, replace
from pathlib import Path

from dbench.config import option_table
from dbench.errors import ServerUnavailable
from dbench.event_file import read_events
from dbench.events import EVENTS_FILE, RunStarted, WorkerLost, WorkerUp
from dbench.load.driver import EXIT_CODES, RunResult, run_load
from dbench.load.stop import StopRule, run_cancellable
from dbench.load.target import GrpcTarget
from dbench.options import COMMAND_SECTIONS, EngineOptions, LoadOptions, SamplingOptions, ServiceOptions
from dbench.run_folder import SERVER_LOG_FILE, write_origin
from dbench.search.objective import ENDS, OnRun
from dbench.search.plan import Job
from dbench.serve.client import Client
from dbench.serve.launch import ServerProcess

logger = logging.getLogger(__name__)

WORKERS_PATIENCE_S = 60.0
"""For workers that a server starts again: longer than its pauses between two starts. A new server is the other way."""
POLL_S = 0.25

RUN_OPTIONS = option_table(COMMAND_SECTIONS["run"])
"""What a run's config.yaml holds, so that `dbench run --config` takes it."""

SET_PER_RUN = ("qps", "concurrency", "num_requests", "name")
FROM_THE_SEARCH = "auto: set by the search"


class ServerRunner:
    """Runs the trials of one job against a server of its own."""

    def __init__(self, job: Job, job_folder: Path, workers_patience_s: float = WORKERS_PATIENCE_S) -> None:
        self._options = job.options
        self._log_path = job_folder / SERVER_LOG_FILE
        self._workers_patience_s = workers_patience_s
        self._stack = ExitStack()
        self._server: ServerProcess | None = None

    def run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun, stop: StopRule) -> RunResult:
        """See TrialRunner."""
        options, values = self._options, asdict(load)
        for name in SET_PER_RUN:
            options = options.replace(name, values[name], FROM_THE_SEARCH)
        write_origin(run_dir, options.to_yaml(RUN_OPTIONS))
        server = self._whole_server()
        result = self._load(server.address, load, run_dir, on_progress, stop)
        if result.reason == "server_lost":
            self.close()
        elif result.reason in ENDS and (loss := lost_worker(run_dir, self._num_workers)):
            return replace(result, reason="server_lost", exit_code=EXIT_CODES["server_lost"], detail=loss)
        return result

    def close(self) -> None:
        """Stop the server, if one runs."""
        self._server = None
        self._stack.close()

    @property
    def _num_workers(self) -> int:
        return self._options.section(EngineOptions).num_workers

    def _whole_server(self) -> ServerProcess:
        """The server of the trial before if all its workers are ready, or soon are; else a new one.

        Raises ServerStartError when a new one does not become ready.
        """
        if self._server is not None and not self._is_whole(self._server):
            logger.warning("the server or a worker has ended; starting another server (see %s)", self._log_path)
            self.close()
        if self._server is None:
            options = self._options
            engine, service = options.section(EngineOptions), options.section(ServiceOptions)
            server = ServerProcess(engine, service, log_path=self._log_path, config_json=options.to_json())
            self._server = self._stack.enter_context(server)
        return self._server

    def _is_whole(self, server: ServerProcess) -> bool:
        key = self._options.section(ServiceOptions).api_key

        async def all_ready() -> bool:
            deadline_s = time.monotonic() + self._workers_patience_s
            async with Client(server.address, key) as client:
                while server.is_alive:
                    if all(worker.ready for worker in (await client.status()).workers):
                        return True
                    if time.monotonic() > deadline_s:
                        return False
                    await asyncio.sleep(POLL_S)
            return False

        try:
            return run_cancellable(all_ready)
        except ServerUnavailable as error:
            logger.debug("%s", error)
            return False

    def _load(self, address: str, load: LoadOptions, run_dir: Path, on_progress: OnRun, stop: StopRule) -> RunResult:
        key, sampling = self._options.section(ServiceOptions).api_key, self._options.section(SamplingOptions)

        async def run() -> RunResult:
            async with aclosing(GrpcTarget(address, key)) as target:
                return await run_load(target, load, sampling, run_dir, on_progress=on_progress, extra_stop=stop)

        return run_cancellable(run)


def lost_worker(run_dir: Path, num_workers: int) -> str:
    """Which worker was away for a part of the load, in words; empty when none was."""
    start_s = math.inf
    up: dict[int, float] = {}
    with (run_dir / EVENTS_FILE).open(encoding="utf-8") as lines:
        for event in read_events(lines):
            match event:
                case RunStarted():
                    start_s = event.at_s
                case WorkerLost():
                    return f"worker {event.worker_id} was lost: {event.reason}"
                case WorkerUp():
                    up[event.worker_id] = event.at_s
    num_ready = sum(at_s <= start_s for at_s in up.values())
    return "" if num_ready == num_workers else f"{num_ready} of {num_workers} workers were ready when the load began"
