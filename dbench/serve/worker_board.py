"""What a worker shows of itself over HTTP: /health for probes and /metrics for Prometheus.

The engine's thread notes what each iteration brought, a few additions; the threads that answer read it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dbench.errors import one_line
from dbench.events import BatchExecuted, Event, WorkerState
from dbench.serve.address import from_this_machine, join_host_port, listen_on
from dbench.serve.sequence import BlockEnd, BlockOutcome

PREFIX = "dbench_"
CALL_TIMEOUT_S = 10
"""A connection that says nothing for so long is closed, and its thread ends."""
JSON_TYPE = "application/json"
LABELS = ("worker_id",)

logger = logging.getLogger(__name__)


class Availability(StrEnum):
    """Whether a worker takes blocks."""

    STARTING = "starting"
    """Or without a server that it works for."""
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class Totals:
    """Since the worker's start."""

    batches: int = 0
    busy_s: float = 0.0
    refresh_tokens: int = 0
    decode_tokens: int = 0
    void_tokens: int = 0
    committed_tokens: int = 0
    denoising_steps: int = 0
    blocks_done: int = 0
    blocks_failed: int = 0


@dataclass(frozen=True, slots=True)
class Shown:
    """One metric: its name without prefix, what it says, and where it is read."""

    name: str
    help: str
    of: Callable[[Totals, WorkerState], float]
    is_counter: bool = False


SHOWN = (
    Shown(
        "diffusion_num_denoising_steps",
        "Forward passes of sequences in blocks that ended here, refreshes included wherever they ran.",
        lambda totals, state: totals.denoising_steps,
        is_counter=True,
    ),
    Shown(
        "diffusion_num_canvas_positions",
        "Rows computed for sequences, refreshes included.",
        lambda totals, state: totals.refresh_tokens + totals.decode_tokens - totals.void_tokens,
        is_counter=True,
    ),
    Shown(
        "diffusion_num_committed_tokens",
        "Tokens unmasked.",
        lambda totals, state: totals.committed_tokens,
        is_counter=True,
    ),
    Shown("batches", "Forward passes of the engine.", lambda totals, state: totals.batches, is_counter=True),
    Shown("batch_seconds", "Time in which a batch ran.", lambda totals, state: totals.busy_s, is_counter=True),
    Shown("refresh_tokens", "Rows of refreshes.", lambda totals, state: totals.refresh_tokens, is_counter=True),
    Shown(
        "decode_tokens",
        "Rows of decode steps, void ones included.",
        lambda totals, state: totals.decode_tokens,
        is_counter=True,
    ),
    Shown(
        "void_tokens",
        "Rows of steps planned for blocks that had ended.",
        lambda totals, state: totals.void_tokens,
        is_counter=True,
    ),
    Shown("blocks_done", "Blocks decoded.", lambda totals, state: totals.blocks_done, is_counter=True),
    Shown("blocks_failed", "Blocks that failed.", lambda totals, state: totals.blocks_failed, is_counter=True),
    Shown("queue_depth_waiting", "Refreshes that wait.", lambda totals, state: state.queue_depth_waiting),
    Shown("queue_depth_active", "Sequences that run.", lambda totals, state: state.queue_depth_active),
    Shown(
        "outstanding_prefill_tokens",
        "Canvas tokens of the blocks in the worker.",
        lambda totals, state: state.outstanding_prefill_tokens,
    ),
    Shown("kv_pages_used", "KV pages in use.", lambda totals, state: state.pages_used),
    Shown("kv_pages", "KV pages.", lambda totals, state: state.pages_total),
    Shown(
        "kv_page_utilization_ratio",
        "Share of the KV pages in use.",
        lambda totals, state: state.pages_used / max(1, state.pages_total),
    ),
    Shown("deficit_tokens", "Token budget saved up for refreshes.", lambda totals, state: state.deficit_tokens),
)
"""A counter's name gets the suffix _total; the first three are called as vLLM calls them."""


class WorkerBoard:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.availability = Availability.STARTING
        self.worker_id: int | None = None
        self._totals = Totals()
        self._state = _idle(0, 0)

    def ready(self, worker_id: int, pages_total: int) -> None:
        """The worker takes blocks from now on, of which it has none."""
        self._state = _idle(worker_id, pages_total)
        self.worker_id = worker_id
        self.availability = Availability.READY

    def away(self) -> None:
        """It has no server: it holds nothing, and has no number."""
        self._state = _idle(0, 0)
        self.worker_id = None
        self.availability = Availability.STARTING

    def note(self, events: Iterable[Event], ended: Sequence[BlockEnd]) -> None:
        """Take in what an iteration brought."""
        totals = self._totals
        for event in events:
            match event:
                case BatchExecuted():
                    totals.batches += 1
                    totals.busy_s += event.at_s - event.start_s
                    totals.refresh_tokens += event.batch_prompt_len
                    totals.decode_tokens += event.batch_gen_len
                    totals.void_tokens += event.batch_num_void_tokens
                    totals.committed_tokens += event.batch_num_unmasked_tokens
                case WorkerState():
                    self._state = event
        for end in ended:
            totals.denoising_steps += len(end.steps)
            totals.blocks_done += end.outcome is BlockOutcome.DONE
            totals.blocks_failed += end.outcome is BlockOutcome.FAILED

    def health(self) -> dict[str, object]:
        """What /health says; state: idle, queued or busy."""
        return {"status": self.availability, "worker_id": self.worker_id, "state": self._state.state}

    def metrics(self) -> Iterator[Metric]:
        """Every metric of SHOWN at this moment."""
        totals, state = self._totals, self._state
        label = ["" if self.worker_id is None else str(self.worker_id)]
        for shown in SHOWN:
            family = (CounterMetricFamily if shown.is_counter else GaugeMetricFamily)(
                PREFIX + shown.name, shown.help, labels=LABELS
            )
            family.add_metric(label, shown.of(totals, state))
            yield family


def _idle(worker_id: int, pages_total: int) -> WorkerState:
    return WorkerState(
        at_s=0.0,
        source=f"worker-{worker_id}",
        worker_id=worker_id,
        state="idle",
        queue_depth_waiting=0,
        queue_depth_active=0,
        outstanding_prefill_tokens=0,
        decode_length_sum=0,
        pages_used=0,
        pages_total=pages_total,
        deficit_tokens=0,
    )


class BoardServer:
    """Answers for a board between `start` and `close`, over plain HTTP and without a key: it shows figures alone."""

    def __init__(self, board: WorkerBoard, host: str, port: int) -> None:
        """Port 0: any free one."""
        self._board, self._host, self._port = board, host, port
        self._server: WSGIServer | None = None

    @property
    def address(self) -> str:
        """host:port; empty where it does not answer."""
        return "" if self._server is None else join_host_port(from_this_machine(self._host), self._server.server_port)

    def start(self) -> None:
        """Bind and answer; a port that cannot be bound is said in the log, for the worker's work does not need it."""
        registry = CollectorRegistry()
        registry.register(_BoardCollector(self._board))
        try:
            self._server = _Server(listen_on(self._host, self._port))
        except OSError as error:
            address = join_host_port(self._host, self._port)
            logger.warning("no health and metrics at %s: %s; the worker goes on without", address, one_line(error))
            return
        self._server.set_app(_application(self._board, registry))
        threading.Thread(target=self._server.serve_forever, name="worker-board", daemon=True).start()
        logger.info("health and metrics at http://%s", self.address)

    def close(self) -> None:
        """Free the port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _BoardCollector(Collector):
    def __init__(self, board: WorkerBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        return self._board.metrics()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        """HTTPServer's own way to bind looks the host's name up, which takes long where no name server answers."""
        super().__init__(listener.getsockname()[:2], _QuietHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port, *_ = listener.getsockname()
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up early is no news: standard error is read as what the worker says."""
        logger.debug("a call of %s failed", client_address, exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    timeout = CALL_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def _application(board: WorkerBoard, registry: CollectorRegistry) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                found: Iterable[bytes] = metrics(environ, start_response)
                return found
            case "/health":
                is_ready = board.availability is Availability.READY
                start_response("200 OK" if is_ready else "503 Service Unavailable", [("Content-Type", JSON_TYPE)])
                return [json.dumps(board.health()).encode() + b"\n"]
            case path:
                start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
                return [f"{path}: nothing here; there are /health and /metrics\n".encode()]

    return answer
