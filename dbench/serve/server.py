"""The server: gRPC endpoint, scheduler and local workers, from the first bind to the last process.

`serve` runs in the calling process; `python -m dbench.serve.server` is the same as a child process of
`launch.ServerProcess`: a ServerConfig comes on standard input, one line of JSON goes to standard output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbench.environment import describe_environment
from dbench.errors import EXIT_INTERRUPTED, DbenchError, ServerStartError, one_line
from dbench.options import HYBRID, PREFILL, EngineOptions, ServiceOptions
from dbench.progress import ServeProgress
from dbench.serve import child
from dbench.serve.address import board_host
from dbench.serve.deployment import Deployment, deployment_of
from dbench.serve.endpoint import Endpoint, check_address
from dbench.serve.fleet import Fleet, FleetRules
from dbench.serve.handover import ServerConfig, WorkerConfig
from dbench.serve.hub import Hub
from dbench.serve.link_service import WorkerTerms
from dbench.serve.local_workers import LocalWorkers
from dbench.serve.meeting import Meeting
from dbench.serve.placement import PLACERS
from dbench.serve.policy import choose
from dbench.serve.recorder import Recorder
from dbench.serve.restarts import Restarts
from dbench.serve.scheduler import Scheduler
from dbench.serve.scheduler_records import SchedulerRules
from dbench.serve.status import ServerDescription
from dbench.serve.tables import TableWriter
from dbench.serve.tls import is_secure
from dbench.values import counted

WORKER_EXIT_TIMEOUT_S = 10.0
REPLY_GRACE_S = 2.0
"""For streams to deliver their last message."""
PROGRESS_PERIOD_S = 0.5
LOOK_PERIOD_S = 1.0
"""Between looks for workers that hang."""
WAITING = "waiting for %s of other hosts; there: dbench worker --scheduler %s%s"
TABLES_TIMEOUT_S = 60.0
"""For tables of an export that are being written when the server ends."""

logger = logging.getLogger(__name__)


class Stop:
    """Somebody wants the server to end: first by draining, on a second Ctrl-C at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()
        self.exit_code = 0

    def on_interrupt(self) -> None:
        """Ctrl-C."""
        if self.requested.is_set():
            self.at_once.set()
        self.exit_code = EXIT_INTERRUPTED
        self.requested.set()

    def on_terminate(self) -> None:
        """SIGTERM."""
        self.requested.set()


@dataclass(frozen=True, slots=True)
class Observer:
    """Who is told what the server does."""

    on_ready: Callable[[str], None]
    """Gets host:port when requests will be run."""
    on_progress: Callable[[ServeProgress], None] | None = None
    on_export: Callable[[], Awaitable[None]] | None = None
    """Writes the tables after somebody has exported the metrics; it may raise DbenchError, and is cancelled when
    the server must end at once."""


def serve(
    engine: EngineOptions,
    service: ServiceOptions,
    *,
    config_json: str,
    on_progress: Callable[[ServeProgress], None] | None,
    on_ready: Callable[[str], None],
    on_export: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Serve until Ctrl-C or SIGTERM and drain; returns the exit code. For the main thread only.

    The options must be resolved. Raises OptionError, ModelError or ServerStartError, with nothing left running.
    """
    check_address(service)
    deployment = deployment_of(engine)
    observer = Observer(on_ready, on_progress, on_export)

    async def run() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.on_interrupt)
        loop.add_signal_handler(signal.SIGTERM, stop.on_terminate)
        return await run_server(deployment, service, config_json, stop, observer)

    return asyncio.run(run())


async def run_server(
    deployment: Deployment, service: ServiceOptions, config_json: str, stop: Stop, observer: Observer
) -> int:
    """Start everything, wait for `stop`, drain, and end everything; raises as `serve` does."""
    directory = Path(service.metrics_output_dir) if service.metrics_output_dir else None
    with Recorder(directory) as recorder, closing(Meeting(service.master_addr, service.master_port)) as meeting:
        hub = build_hub(deployment, service, recorder)
        environment = json.dumps(await asyncio.to_thread(describe_environment))
        description = ServerDescription(
            deployment, config_json, environment, service.metrics_output_dir or "", hub.clock()
        )
        if deployment.options.mode == HYBRID:
            await meeting.start()
        terms = worker_terms(deployment, service, meeting.address)
        endpoint = Endpoint(hub, service, terms, lambda: description.status(hub))
        await endpoint.start()
        configs = worker_configs(deployment, service, endpoint.local_address, terms.worker_key)
        local = LocalWorkers(configs, hub.worker_gone)
        restarts = Restarts(hub, local, service.startup_timeout_s)
        tables = None if observer.on_export is None else TableWriter(hub, observer.on_export)
        tasks = [asyncio.create_task(_follow_health(hub, endpoint))]
        if observer.on_progress is not None:
            show = observer.on_progress
            tasks.append(asyncio.create_task(_tick(lambda: show(description.progress(hub, endpoint.address)))))
        if tables is not None:
            tasks.append(asyncio.create_task(tables.run()))
        has_drained = False
        try:
            say_who_is_awaited(service, endpoint.address)
            await local.start()
            if await _all_ready(hub, local, stop, service.startup_timeout_s):
                tasks += [restarts.start(), asyncio.create_task(_lose_hanging_workers(hub))]
                hub.is_open = True
                await endpoint.set_serving(True)
                hub.announce()
                observer.on_ready(endpoint.address)
                await _first_of(stop.requested.wait(), *tasks)
                has_drained = await _drain(hub, local, restarts, stop, service.drain_timeout_s)
                if tables is not None:
                    await _first_of(tables.finish(), stop.at_once.wait(), asyncio.sleep(TABLES_TIMEOUT_S))
        finally:
            await restarts.stop()
            for task in tasks:
                task.cancel()
            await _end(hub, local, endpoint, at_once=not has_drained)
            hub.has_ended = True
            if observer.on_progress is not None:
                observer.on_progress(description.progress(hub, endpoint.address))
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    return stop.exit_code


def build_hub(deployment: Deployment, service: ServiceOptions, recorder: Recorder) -> Hub:
    """A scheduler for the deployment's workers, all of them still starting."""
    options = deployment.options
    rules = SchedulerRules(
        limits=deployment.request_limits(),
        mask_token_id=deployment.mask_token_id,
        max_block_retries=options.max_block_retries,
        max_queued_requests=service.max_queued_requests,
        worker_timeout_s=service.worker_timeout_s,
    )
    fleet = Fleet(
        FleetRules(
            deployment.devices,
            service.num_remote_workers,
            service.startup_timeout_s,
            num_prefill=deployment.num_prefill,
            num_remote_prefill=service.num_remote_prefill_workers,
            refreshes_anywhere=options.mode != HYBRID or options.enable_hybrid_prefill_overflow,
        )
    )
    placer = choose("mode", PLACERS, options.mode)(options, fleet)
    scheduler = Scheduler(rules, fleet, placer, lambda: uuid.uuid4().hex)
    return Hub(scheduler, recorder, clock=time.monotonic, log_requests=service.log_requests)


def worker_terms(deployment: Deployment, service: ServiceOptions, meeting_address: str) -> WorkerTerms:
    """Without a key of its own a server makes one that only the workers it starts are told."""
    key = service.worker_key
    return WorkerTerms(
        worker_key=secrets.token_urlsafe(32) if key is None else key,
        takes_remote=key is not None,
        engine=deployment.options,
        model_fingerprint=deployment.model_fingerprint(),
        meeting_address=meeting_address,
    )


def worker_configs(
    deployment: Deployment, service: ServiceOptions, address: str, worker_key: str
) -> list[WorkerConfig]:
    """One per device; the workers on the CPU share its cores, less one for the scheduler and its clients."""
    num_on_cpu = sum(device.startswith("cpu") for device in deployment.devices)
    num_threads = max(1, (child.num_cores() - 1) // max(1, num_on_cpu))
    level = logging.getLogger().getEffectiveLevel()
    return [
        WorkerConfig(
            scheduler=address,
            worker_key=worker_key,
            worker_id=worker_id,
            device=device,
            num_threads=num_threads,
            log_level=level,
            board_host=board_host(service),
            board_port=service.base_worker_port and service.base_worker_port + worker_id,
        )
        for worker_id, device in enumerate(deployment.devices)
    ]


def say_who_is_awaited(service: ServiceOptions, address: str) -> None:
    """Log the commands with which workers of other hosts join."""
    trust = " --tls-ca FILE" if is_secure(service) else ""
    if service.num_remote_workers:
        logger.info(WAITING, counted(service.num_remote_workers, "worker"), address, trust)
    if service.num_remote_prefill_workers:
        number = counted(service.num_remote_prefill_workers, "prefill worker")
        logger.info(WAITING, number, address, f"{trust} --worker-type {PREFILL}")


async def _all_ready(hub: Hub, local: LocalWorkers, stop: Stop, timeout_s: float) -> bool:
    """Whether all workers became ready before somebody wanted the end. Raises ServerStartError."""
    ready = asyncio.ensure_future(hub.until_news(hub.all_workers_ready))
    ended = asyncio.ensure_future(local.first_ended())
    stopped = asyncio.ensure_future(stop.requested.wait())
    waits: list[asyncio.Future[Any]] = [ready, ended, stopped]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            logger.info("the server was stopped while it was starting")
            return False
        if ended.done():
            worker = ended.result()
            reason = hub.fatal_errors.get(worker.worker_id) or worker.last_line or worker.ending
            raise ServerStartError(f"worker {worker.worker_id} ({worker.device}) did not start: {reason}")
        if not ready.done():
            late = [f"{w.worker_id} ({w.kind}, {w.state})" for w in hub.worker_statuses() if not w.ready]
            raise ServerStartError(
                f"workers {', '.join(late)} were not ready within startup_timeout_s {timeout_s:g}; "
                "raise --startup-timeout-s or look at their log lines"
            )
        return True
    finally:
        for wait in waits:
            wait.cancel()


async def _drain(hub: Hub, local: LocalWorkers, restarts: Restarts, stop: Stop, timeout_s: float) -> bool:
    """Refuse new requests, let running ones end, then the workers; False when somebody wants the end at once."""
    hub.is_draining = True
    hub.announce()
    logger.info("draining: %d requests in the server, up to %g s", hub.num_in_server, timeout_s)
    await _first_of(hub.until(lambda: hub.num_in_server == 0), stop.at_once.wait(), asyncio.sleep(timeout_s))
    if hub.num_in_server and not stop.at_once.is_set():
        hub.cancel_all(f"the server was stopped, and the request had not ended within drain_timeout_s {timeout_s:g}")
    await restarts.stop()
    local.kill([worker.worker_id for worker in hub.worker_statuses() if not worker.ready])  # they only start
    hub.drain_workers()
    await _first_of(_all_gone(hub, local), stop.at_once.wait())
    return not stop.at_once.is_set()


async def _all_gone(hub: Hub, local: LocalWorkers) -> None:
    """Wait for the end of all workers, remote ones as well, at most WORKER_EXIT_TIMEOUT_S."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WORKER_EXIT_TIMEOUT_S):
            await local.wait(WORKER_EXIT_TIMEOUT_S)
            await hub.until_news(hub.has_no_worker)


async def _end(hub: Hub, local: LocalWorkers, endpoint: Endpoint, *, at_once: bool) -> None:
    """Nothing is left when this returns: no request without a status, no process, no port."""
    hub.is_draining = True
    hub.cancel_all("the server has ended")
    hub.drain_workers()  # from here on the end of a worker is no loss
    if at_once:
        local.kill()
    await local.end()
    await endpoint.stop(REPLY_GRACE_S)


async def _follow_health(hub: Hub, endpoint: Endpoint) -> None:
    while True:
        was_ready = hub.is_ready
        await endpoint.set_serving(was_ready)
        await hub.until_news(lambda: hub.is_ready != was_ready)  # noqa: B023  read before the loop goes on


async def _lose_hanging_workers(hub: Hub) -> None:
    while True:
        await asyncio.sleep(LOOK_PERIOD_S)
        hub.lose_hanging_workers()


async def _tick(show: Callable[[], None]) -> None:
    while True:
        show()
        await asyncio.sleep(PROGRESS_PERIOD_S)


async def _first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Wait until one has ended; coroutines that have not are cancelled, tasks go on."""
    futures = [wait if isinstance(wait, asyncio.Task) else asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, wait in zip(futures, waits, strict=True):
            if future is not wait:
                future.cancel()


def main() -> int:
    """Run one server process; returns its exit code."""

    def answer(key: str, value: str) -> None:
        print(json.dumps({key: value}), flush=True)

    line = child.read_config_line()
    if not line:
        return child.PARENT_GONE_EXIT_CODE
    child.end_with_parent()
    try:
        config = ServerConfig.from_json(line)
        child.log_to_stderr(config.log_level)
        return serve(
            config.engine,
            config.service,
            config_json=config.config_json,
            on_progress=None,
            on_ready=lambda address: answer("address", address),
        )
    except DbenchError as error:
        answer("error", str(error))
        return error.exit_code
    except Exception as error:
        logger.exception("the server cannot go on")
        answer("error", f"{type(error).__name__}: {one_line(error)}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
