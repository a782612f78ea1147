"""A real gRPC server in this process, whose workers are threads with scripted runners."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from dbench.config import resolve
from dbench.errors import ServerUnavailable
from dbench.events import Event
from dbench.options import EngineOptions, ServiceOptions
from dbench.resolve import resolve_serve
from dbench.serve.client import Client
from dbench.serve.deployment import deployment_of
from dbench.serve.endpoint import Endpoint
from dbench.serve.engine import Engine
from dbench.serve.fake_runner import FakeRunner, FakeScript, SystemClock
from dbench.serve.pages import PagePool
from dbench.serve.recorder import Recorder
from dbench.serve.server import build_hub, worker_terms
from dbench.serve.status import ServerDescription
from dbench.serve.wire import PollState
from dbench.serve.wire_link import Hello, Ready
from dbench.serve.worker import WorkerLoop, wait_for_welcome
from dbench.serve.worker_board import WorkerBoard
from dbench.serve.worker_stream import WorkerStream

T = TypeVar("T")

WORKER_KEY = "the key of this test"
DEADLINE_S = 60.0
SMALL: Mapping[str, object] = {
    "block_length": 4,
    "max_batch_size": 8,
    "max_model_len": 256,
    "kv_max_pages": 128,
    "kv_page_size": 16,
    "scheduler_port": 0,
    "base_worker_port": 0,
}


def options(**given: object) -> tuple[EngineOptions, ServiceOptions, str]:
    """Resolved options of a small server on the embedded model."""
    resolved = resolve_serve(
        resolve((EngineOptions, ServiceOptions), {**SMALL, **given}, yaml_path=None, environment={})
    )
    return resolved.section(EngineOptions), resolved.section(ServiceOptions), resolved.to_json()


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario that must not hang."""
    return asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it holds; fails after the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        await asyncio.sleep(0.01)


async def final_state(client: Client, request_id: str) -> PollState:
    """Poll until the request has its final status."""

    async def is_final() -> bool:
        return (await client.poll(request_id)).status in ("COMPLETED", "ERROR", "CANCELLED")

    await eventually(is_final)
    return await client.poll(request_id)


async def events_of(client: Client) -> list[Event]:
    """All that the server exports."""
    async with aclosing(client.export_events()) as events:
        return [event async for event in events]


class ThreadWorker:
    """A worker of the real loop and stream on a scripted runner; without a number it is one of another host."""

    def __init__(
        self, server: ServerInThisProcess, worker_id: int | None, script: FakeScript, instance: str = ""
    ) -> None:
        self.error: BaseException | None = None
        assert server.deployment.kv_max_pages is not None
        self.num_pages = server.deployment.kv_max_pages
        self._deployment = server.deployment
        self.drain_timeout_s = DEADLINE_S
        self._script = script
        hello = Hello(WORKER_KEY, worker_id, "cpu", 1, host="elsewhere" if instance else "", instance=instance)
        self.stream = WorkerStream(server.endpoint.local_address, hello)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> ThreadWorker:
        self.stream.start()
        self.thread.start()
        return self

    async def has_been_sent(self, num_commands: int) -> None:
        """Wait until so many have come that its loop has not taken yet."""

        async def have_come() -> bool:
            return self.stream._inbox.qsize() == num_commands

        await eventually(have_come)

    def vanish(self) -> None:
        """Hang up without a word."""
        self.stream.close()

    def _run(self) -> None:
        limits = self._deployment.engine_limits()
        page_size = self._deployment.options.kv_page_size
        runner = FakeRunner(self._script, page_size=page_size, clock=SystemClock())
        try:
            worker_id = wait_for_welcome(self.stream).worker_id
            engine = Engine(runner, PagePool(self.num_pages, page_size), limits, worker_id=worker_id)
            self.stream.send(Ready(self.num_pages, page_size, limits.max_model_len))
            WorkerLoop(engine, self.stream, WorkerBoard(), self.drain_timeout_s).run()
        except ServerUnavailable as error:
            self.error = error
        finally:
            self.stream.close()


class ServerInThisProcess:
    """`async with`: an endpoint on a free port that expects as many workers as `gpus` names."""

    def __init__(self, *, recorder: Recorder | None = None, **given: object) -> None:
        engine, self.service, self.config_json = options(**{"gpus": "cpu,cpu", **given})
        self.deployment = deployment_of(engine)
        self.recorder = recorder or Recorder(None)
        self.hub = build_hub(self.deployment, self.service, self.recorder)
        description = ServerDescription(self.deployment, self.config_json, '{"machine":"test"}', "", 0.0)
        self.terms = replace(worker_terms(self.deployment, self.service, ""), worker_key=WORKER_KEY)
        self.endpoint = Endpoint(self.hub, self.service, self.terms, lambda: description.status(self.hub))
        self.workers: list[ThreadWorker] = []

    async def __aenter__(self) -> ServerInThisProcess:
        self.recorder.__enter__()
        await self.endpoint.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.hub.cancel_all("the test is over")
        self.hub.drain_workers()
        await self.endpoint.stop(0.2)
        for worker in self.workers:
            await asyncio.to_thread(worker.thread.join, DEADLINE_S)
            assert not worker.thread.is_alive(), "a worker thread did not end"
        self.recorder.__exit__(None, None, None)

    def add_worker(self, worker_id: int, script: FakeScript | None = None) -> ThreadWorker:
        worker = ThreadWorker(self, worker_id, script or FakeScript()).start()
        self.workers.append(worker)
        return worker

    def join(self, instance: str, script: FakeScript | None = None) -> ThreadWorker:
        """A worker of another host dials in."""
        worker = ThreadWorker(self, None, script or FakeScript(), instance).start()
        self.workers.append(worker)
        return worker

    async def has_states(self, *states: str) -> None:
        """Wait until the workers are in these states."""
        await self.hub.until(lambda: [worker.state for worker in self.hub.worker_statuses()] == list(states))

    async def open(self, script: FakeScript | None = None) -> ServerInThisProcess:
        """Let all workers join, as a server does before it says that it is ready."""
        for worker_id in range(len(self.deployment.devices)):
            self.add_worker(worker_id, script)
        await self.hub.until(self.hub.all_workers_ready)
        self.hub.is_open = True
        await self.endpoint.set_serving(True)
        return self

    def client(self, api_key: str | None = None) -> Client:
        return Client(self.endpoint.address, api_key)


class Gate:
    """Holds a scripted runner back until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.reached = threading.Event()
        self.script = replace(FakeScript(), num_unmasked=self._pass)

    def open(self) -> None:
        self._opened.set()

    def _pass(self, task: object, step: int) -> int:
        self.reached.set()
        assert self._opened.wait(DEADLINE_S), "the gate was never opened"
        return 1
