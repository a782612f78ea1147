"""Trials against a real server: one per job, started for its first run and kept until it is lost or the job ends."""

from __future__ import annotations

import logging
from contextlib import aclosing
from pathlib import Path

from dbench.config import option_table
from dbench.environment import describe_environment
from dbench.load.driver import RunResult, run_load
from dbench.load.stop import run_cancellable
from dbench.load.target import GrpcTarget
from dbench.options import COMMAND_SECTIONS, EngineOptions, LoadOptions, SamplingOptions, ServiceOptions
from dbench.result_files import write_json, write_text
from dbench.search.objective import OnRun
from dbench.search.plan import Job
from dbench.serve.launch import ServerProcess

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
SERVER_LOG_FILE = "server.log"

RUN_OPTIONS = option_table(COMMAND_SECTIONS["run"])
"""What a run's config.yaml holds, so that `dbench run --config` takes it."""

FROM_THE_SEARCH = "auto: set by the search"


class ServerRunner:
    """Runs the trials of one job against a server of its own."""

    def __init__(self, job: Job, job_folder: Path) -> None:
        self._options = job.options
        self._log_path = job_folder / SERVER_LOG_FILE
        self._server: ServerProcess | None = None

    def run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun) -> RunResult:
        """See TrialRunner."""
        options = self._options
        for name in ("qps", "concurrency", "num_requests", "name"):
            options = options.replace(name, getattr(load, name), FROM_THE_SEARCH)
        write_text(run_dir / CONFIG_FILE, options.to_yaml(RUN_OPTIONS))
        write_json(run_dir / ENVIRONMENT_FILE, describe_environment())
        server = self._ready_server()
        result = self._load(server.address, load, run_dir, on_progress)
        if result.reason == "server_lost":
            self.close()
        return result

    def close(self) -> None:
        """Stop the server, if one runs."""
        if self._server is not None:
            server, self._server = self._server, None
            server.__exit__(None, None, None)

    def _ready_server(self) -> ServerProcess:
        if self._server is not None and not self._server.is_alive:
            logger.warning("the server has ended between two trials; starting another one (see %s)", self._log_path)
            self.close()
        if self._server is None:
            options = self._options
            engine, service = options.section(EngineOptions), options.section(ServiceOptions)
            server = ServerProcess(engine, service, log_path=self._log_path, config_json=options.to_json())
            server.__enter__()
            self._server = server
        return self._server

    def _load(self, address: str, load: LoadOptions, run_dir: Path, on_progress: OnRun) -> RunResult:
        key, sampling = self._options.section(ServiceOptions).api_key, self._options.section(SamplingOptions)

        async def run() -> RunResult:
            async with aclosing(GrpcTarget(address, key)) as target:
                return await run_load(target, load, sampling, run_dir, on_progress=on_progress)

        return run_cancellable(run)
