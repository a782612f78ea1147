"""A worker that no server has started: it dials one, works for it, and dials again when that is gone.

The model stays loaded between two servers that want the same of it. Ctrl-C or SIGTERM drains the worker;
a second one ends it at once.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING

from dbench.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    DbenchError,
    ModelError,
    OptionError,
    ServerUnavailable,
    one_line,
)
from dbench.options import COLOCATED, PREFILL, EngineOptions
from dbench.serve.address import LOOPBACK
from dbench.serve.deployment import Deployment, deployment_of
from dbench.serve.engine import Engine
from dbench.serve.wire_link import Fatal, Hello, Leaving, Welcome
from dbench.serve.worker import (
    WorkerLoop,
    load_runner,
    new_engine,
    new_transfer,
    ready,
    wait_for_welcome,
    yield_the_cpu,
)
from dbench.serve.worker_board import BoardServer, WorkerBoard
from dbench.serve.worker_stream import WorkerStream

if TYPE_CHECKING:
    from dbench.serve.kv import KvRunner
    from dbench.serve.transfer import Transfer

CUDA = "cuda:"
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteWorkerConfig:
    """One worker, and the server that it wants to work for."""

    scheduler: str
    """host:port"""
    worker_key: str = field(repr=False)
    device: str
    """cpu or cuda:N."""
    model: str | None
    """Where this host has the model; None: where the server has it."""
    num_threads: int
    drain_timeout_s: float
    reconnect_timeout_s: float
    """0: for ever."""
    tls_ca: str | None = None
    """File with the certificates to trust; None: no TLS."""
    board_port: int | None = None
    """Of its health and metrics on this host; 0: any free one; None: it shows none."""
    kind: str = COLOCATED
    """What it wants to be: COLOCATED or PREFILL."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and what it was loaded for."""

    engine: EngineOptions
    fingerprint: str
    deployment: Deployment
    runner: KvRunner

    def suits(self, welcome: Welcome) -> bool:
        return (self.engine, self.fingerprint) == (welcome.engine, welcome.model_fingerprint)


@dataclass(frozen=True, slots=True)
class InService:
    """What serves one server, from its welcome to the end of the stream."""

    worker_id: int
    engine: Engine
    transfer: Transfer | None


class RemoteWorker:
    """`run` is for the main thread; `on_ready` gets the number under which a server knows the worker."""

    def __init__(
        self, config: RemoteWorkerConfig, on_ready: Callable[[int], None], hang_timeout_s: float = 60.0
    ) -> None:
        self._config = config
        self._on_ready = on_ready
        self._hang_timeout_s = hang_timeout_s
        self._instance = uuid.uuid4().hex
        self._board = WorkerBoard()
        port = config.board_port
        self._board_server = None if port is None else BoardServer(self._board, LOOPBACK, port)
        self._loaded: Loaded | None = None
        self._in_service: WorkerStream | None = None
        self._is_leaving = False
        self._exit_code = EXIT_OK

    def run(self) -> int:
        """Work until somebody wants the end; returns the exit code.

        Raises ServerUnavailable after reconnect_timeout_s without a server, and at once WorkerRefused,
        ModelError, OptionError, or whatever broke the engine.
        """
        check_device(self._config.device)
        yield_the_cpu(self._config.device)
        with self._signals():
            try:
                if self._board_server is not None:
                    self._board_server.start()
                self._work()
            except KeyboardInterrupt:
                logger.info("the worker ends at once")
            finally:
                self._unload()
                if self._board_server is not None:
                    self._board_server.close()
        return self._exit_code

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal drains a worker in service; any other ends it, from wherever it is."""
        self._exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_OK
        if self._is_leaving or self._in_service is None:
            raise KeyboardInterrupt
        self._is_leaving = True
        self._in_service.ask_to_leave()

    def _work(self) -> None:
        config, pause_s, alone_since_s = self._config, FIRST_PAUSE_S, time.monotonic()
        while True:
            was_ready, reason = self._dial()
            if self._is_leaving:
                logger.info("%s: the worker has left", config.scheduler)
                return
            if was_ready:
                pause_s, alone_since_s = FIRST_PAUSE_S, time.monotonic()
            alone_s = time.monotonic() - alone_since_s
            if config.reconnect_timeout_s and alone_s + pause_s > config.reconnect_timeout_s:
                limit = f"reconnect_timeout_s {config.reconnect_timeout_s:g}"
                raise ServerUnavailable(f"no server at {config.scheduler} took the worker in within {limit}: {reason}")
            logger.warning("%s: %s; the worker dials again in %g s", config.scheduler, reason, pause_s)
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _dial(self) -> tuple[bool, str]:
        """One stream, from its hello to its end: whether the worker was ready in it, and why it ended."""
        config = self._config
        hello = Hello(
            config.worker_key,
            None,
            config.device,
            os.getpid(),
            host=socket.gethostname(),
            instance=self._instance,
            kind=config.kind,
        )
        stream = WorkerStream(config.scheduler, hello, config.tls_ca)
        stream.start()
        was_ready = False
        try:
            own = self._prepare(stream)
            was_ready = True
            self._on_ready(own.worker_id)
            self._serve(own, stream)
            return was_ready, "the server ends"
        except ServerUnavailable as error:
            return was_ready, str(error)
        except KeyboardInterrupt:
            stream.send(Leaving())
            raise
        except DbenchError as error:
            stream.send(Fatal(str(error)))
            raise
        except Exception as error:
            stream.send(Fatal(f"{type(error).__name__}: {one_line(error)}"))
            raise
        finally:
            stream.close()

    def _prepare(self, stream: WorkerStream) -> InService:
        """Load what the server wants, if it is not loaded already, and report ready."""
        welcome = wait_for_welcome(stream)
        logger.info("%s: taken in as worker %d", self._config.scheduler, welcome.worker_id)
        loaded = self._load(welcome)
        if not stream.is_open:
            raise ServerUnavailable("the stream to the scheduler ended while the model was loaded")
        transfer = new_transfer(welcome, loaded.deployment, loaded.runner, stream)
        engine = new_engine(welcome, loaded.deployment, loaded.runner, transfer)
        self._board.ready(welcome.worker_id, loaded.deployment.kv_max_pages or 0)
        stream.send(ready(loaded.deployment, self._board_server))
        return InService(welcome.worker_id, engine, transfer)

    def _serve(self, own: InService, stream: WorkerStream) -> None:
        """Until drained. A lost stream leaves the engine empty, so that its runner can serve another."""
        has_returned = threading.Event()
        threading.Thread(target=self._end_if_hanging, args=(stream, has_returned), daemon=True).start()
        self._in_service = stream
        try:
            WorkerLoop(own.engine, stream, self._board, self._config.drain_timeout_s, own.transfer).run()
        except ServerUnavailable:
            empty(own.engine, self._board)
            raise
        finally:
            self._board.away()
            self._in_service = None
            has_returned.set()

    def _end_if_hanging(self, stream: WorkerStream, has_returned: threading.Event) -> None:
        """End the process when its device hangs: nobody else could, and it would keep the device for ever."""
        stream.wait_until_ended()
        if not has_returned.wait(self._hang_timeout_s):
            logger.error("the device has not answered for %g s since the stream ended", self._hang_timeout_s)
            os._exit(EXIT_FAILED)

    def _load(self, welcome: Welcome) -> Loaded:
        if self._loaded is not None and self._loaded.suits(welcome):
            return self._loaded
        self._unload()
        deployment = deployment_on_this_host(welcome, self._config.model)
        config, refresh_only = self._config, welcome.kind == PREFILL
        runner, deployment = load_runner(deployment, config.device, config.num_threads, refresh_only=refresh_only)
        self._loaded = Loaded(welcome.engine, welcome.model_fingerprint, deployment, runner)
        return self._loaded

    def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        loaded.runner.close()
        del loaded
        free_memory(self._config.device)


def deployment_on_this_host(welcome: Welcome, model: str | None) -> Deployment:
    """What the server serves, from this host's files. Raises ModelError when they are missing or others."""
    options = welcome.engine if model is None else replace(welcome.engine, model=model)
    try:
        deployment = deployment_of(options)
    except ModelError as error:
        if model is not None:
            raise
        raise ModelError(f"{error} (so the server calls it; give --model for this host)") from None
    if deployment.model_fingerprint() != welcome.model_fingerprint:
        raise ModelError(
            f"{deployment.model_dir}: its config.json or weights differ from the server's; "
            "give --model with a copy of the same checkpoint"
        )
    return deployment


def empty(engine: Engine, board: WorkerBoard) -> None:
    """Let all blocks go whose results nobody waits for any more; the device finishes what it runs."""
    for key in engine.held:
        engine.cancel(key)
    while (report := engine.step()) is not None:
        board.note(engine.take_events(), report.ended)


def free_memory(device: str) -> None:
    """Give back what a runner held that nobody refers to any more: the next one takes nearly all that is free."""
    gc.unfreeze()  # it was frozen when it had been loaded, cycles and all
    gc.collect()
    if device.startswith(CUDA):
        import torch

        torch.cuda.empty_cache()


def check_device(device: str) -> None:
    """Raises OptionError for a CUDA device that torch does not see."""
    if not device.startswith(CUDA):
        return
    import torch

    number, found = device.removeprefix(CUDA), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number) >= found:
        raise OptionError(f"gpu: got {number}, but torch sees {found} CUDA devices here; give another, or 'cpu'")
