"""A dbench server inside the test's process: all of it real but the runner, which computes nothing."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from dbench.errors import ServerUnavailable
from dbench.options import EngineOptions, ServiceOptions
from dbench.serve.deployment import Deployment, deployment_of
from dbench.serve.endpoint import Endpoint
from dbench.serve.engine import Engine
from dbench.serve.fake_runner import FakeRunner, FakeScript, SystemClock
from dbench.serve.pages import PagePool
from dbench.serve.recorder import Recorder
from dbench.serve.server import build_hub
from dbench.serve.status import ServerDescription
from dbench.serve.wire_link import Hello, Ready
from dbench.serve.worker import WorkerLoop, wait_for_welcome
from dbench.serve.worker_stream import WorkerStream

WORKER_KEY = "key"

OPTIONS = EngineOptions(
    model="embedded",
    gpus="cpu,cpu",
    block_length=32,
    mask_id=0,
    max_model_len=1024,
    kv_max_pages=1024,
    tokenizer="",
    served_model_name="embedded",
)


@dataclass(slots=True)
class EmbeddedServer:
    """Answers at `address` until it is lost."""

    address: str
    endpoint: Endpoint

    async def lose(self) -> None:
        """Go away in the middle of everything."""
        await self.endpoint.stop(0)


@asynccontextmanager
async def embedded_server(
    script: FakeScript | None = None, service: ServiceOptions | None = None
) -> AsyncIterator[EmbeddedServer]:
    """Scheduler, endpoint and two workers, ready for requests."""
    deployment = deployment_of(OPTIONS)
    service = replace(service or ServiceOptions(), scheduler_port=0)
    with Recorder(None) as recorder:
        hub = build_hub(deployment, service, recorder)
        description = ServerDescription(deployment, "{}", "{}", "", hub.clock())
        endpoint = Endpoint(hub, service, WORKER_KEY, lambda: description.status(hub))
        await endpoint.start()
        workers = [
            threading.Thread(target=work, args=(deployment, endpoint.local_address, number, script or FakeScript()))
            for number in range(len(deployment.devices))
        ]
        for worker in workers:
            worker.start()
        try:
            await hub.until(hub.all_workers_ready)
            hub.is_open = True
            await endpoint.set_serving(True)
            yield EmbeddedServer(endpoint.address, endpoint)
        finally:
            await endpoint.stop(0)
            for worker in workers:
                worker.join()


def work(deployment: Deployment, address: str, worker_id: int, script: FakeScript) -> None:
    """One worker, until the server goes away."""
    options = deployment.options
    stream = WorkerStream(address, Hello(WORKER_KEY, worker_id, "cpu", 0))
    stream.start()
    wait_for_welcome(stream, worker_id)
    runner = FakeRunner(script, page_size=options.kv_page_size, clock=SystemClock())
    pages = PagePool(deployment.kv_max_pages, options.kv_page_size)
    engine = Engine(runner, pages, deployment.engine_limits(), worker_id=worker_id)
    stream.send(Ready(deployment.kv_max_pages, options.kv_page_size, deployment.max_model_len))
    try:
        WorkerLoop(engine, stream).run()
    except ServerUnavailable:
        pass
    finally:
        stream.close()
