"""A worker's end of the stream to its scheduler.

One thread reads commands into an inbox and notes when blocks came; gRPC's own sender thread takes messages
from an outbox, turns them into JSON and protobuf there, and adds a heartbeat when nothing was said for a second.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from dbench.errors import one_line
from dbench.events import Event, event_to_json
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.proto.dbench_pb2_grpc import WorkerLinkStub
from dbench.serve.sequence import BlockEnd, BlockKey, BlockTask, HandedOver
from dbench.serve.tls import channel_credentials, mismatch
from dbench.serve.transit import KvNews
from dbench.serve.wire import MAX_MESSAGE_BYTES
from dbench.serve.wire_link import (
    CancelBlock,
    Command,
    Drain,
    EngineProgress,
    Fatal,
    Hello,
    Leaving,
    Ready,
    ReserveBlock,
    RunBlock,
    SendBlock,
    Welcome,
    command_from_message,
    worker_message_to_message,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Answers to a hello that dialling again would not change."""
CLOSE_TIMEOUT_S = 5.0
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new dial is a new connection, without the pauses of the last one
    ("grpc.enable_http_proxy", 0),  # one from the environment is for web pages, and does not know this address
)


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """A RunBlock, and when it came: the engine may be busy with a batch for long after."""

    task: BlockTask
    at_s: float
    """The worker's monotonic clock."""


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The last thing in an inbox: nothing can be sent or received any more."""

    reason: str
    is_refusal: bool = False
    """The scheduler does not want this worker, and would not later either."""


Incoming = Welcome | BlockArrived | ReserveBlock | CancelBlock | Drain | KvNews | StreamEnded


class EagerListener(Protocol):
    """What need not wait for the engine, which may be busy with a batch; called in the reader's thread."""

    def block_arrived(self, task: BlockTask) -> None:
        """It will be among the commands too."""

    def send_block(self, command: SendBlock) -> None:
        """It will not."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one engine iteration brought; it becomes an EngineProgress in the sender thread."""

    iteration: int
    refreshed: tuple[BlockKey, ...]
    ended: tuple[BlockEnd, ...]
    events: tuple[Event, ...]
    reserved: tuple[BlockKey, ...] = ()
    handed_over: tuple[HandedOver, ...] = ()


@dataclass(frozen=True, slots=True)
class _Close:
    """Ends the outbox."""


class WorkerStream:
    """Between `start` and `close`; `send` and the inbox may be used from one thread."""

    def __init__(self, address: str, hello: Hello, tls_ca: str | None = None) -> None:
        self._address = address
        self._hello = hello
        self._tls_ca = tls_ca
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Ready | Fatal | Leaving | Report | _Close] = queue.SimpleQueue()
        self._iteration_began_s: float | None = None
        self._eager: EagerListener | None = None
        self._channel: grpc.Channel | None = None
        self._reader = threading.Thread(target=self._read, name="stream-reader", daemon=True)

    @property
    def is_open(self) -> bool:
        """Between `start` and its end from either side, of which StreamEnded tells."""
        return self._reader.is_alive()

    def wait_until_ended(self) -> None:
        """From any thread, after `start`."""
        self._reader.join()

    def start(self) -> None:
        """Dial the scheduler; what comes of it is in the inbox. Raises OptionError for a useless tls_ca."""
        if self._tls_ca is None:
            self._channel = grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        else:
            credentials = channel_credentials(self._tls_ca)
            self._channel = grpc.secure_channel(self._address, credentials, options=CHANNEL_OPTIONS)
        self._reader.start()

    def listen(self, listener: EagerListener) -> None:
        """To be called before the worker is ready, and so before any block comes."""
        self._eager = listener

    def post(self, news: KvNews) -> None:
        """Put something among the commands, from any thread."""
        self._inbox.put(news)

    def send(self, message: Ready | Fatal | Leaving | Report) -> None:
        """Queue a message; returns at once."""
        self._outbox.put(message)

    def ask_to_leave(self) -> None:
        """Ask for a Drain, which comes among the commands; may be called by a signal handler."""
        self._outbox.put(Leaving())

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """An iteration of the engine runs: heartbeats tell for how long."""
        self._iteration_began_s = time.monotonic()
        try:
            yield
        finally:
            self._iteration_began_s = None

    def wait_for_commands(self, timeout_s: float = math.inf) -> list[Incoming]:
        """All commands that have come; waits for the first, at most so long."""
        try:
            first = self._inbox.get(timeout=None if timeout_s == math.inf else max(0.0, timeout_s))
        except queue.Empty:
            return []
        return [first, *self.commands()]

    def commands(self) -> list[Incoming]:
        """All commands that have come; does not wait."""
        found: list[Incoming] = []
        while True:
            try:
                found.append(self._inbox.get_nowait())
            except queue.Empty:
                return found

    def close(self) -> None:
        """Send what is queued, end the stream and hang up."""
        self._outbox.put(_Close())
        if self._channel is not None:
            self._reader.join(CLOSE_TIMEOUT_S)
            self._channel.close()

    def _read(self) -> None:
        assert self._channel is not None, "the stream reads before it was started"
        stub: Any = WorkerLinkStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            for message in stub.Connect(self._messages()):
                at_s = time.monotonic()
                command = command_from_message(message)
                self._sort(command, at_s)
            ended = StreamEnded("the scheduler closed the stream")
        except grpc.RpcError as error:
            ended = _ended_by(error, is_secure=self._tls_ca is not None)
        except ValueError as error:
            ended = StreamEnded(one_line(error), is_refusal=True)
        except Exception as error:  # whatever it is, the engine must not wait for commands for ever
            logger.exception("the reader of the stream has failed")
            ended = StreamEnded(f"its reader has failed: {type(error).__name__}: {one_line(error)}")
        self._inbox.put(ended)

    def _sort(self, command: Command, at_s: float) -> None:
        """Raises ValueError for a command that a worker without others to exchange KV with cannot obey."""
        match command:
            case RunBlock(task):
                if self._eager is not None:
                    self._eager.block_arrived(task)
                self._inbox.put(BlockArrived(task, at_s))
            case SendBlock():
                if self._eager is None:
                    raise ValueError("told to send KV where only colocated workers are")
                self._eager.send_block(command)
            case _:
                self._inbox.put(command)

    def _messages(self) -> Iterator[pb.WorkerMessage]:
        """Runs in gRPC's sender thread."""
        yield worker_message_to_message(self._hello)
        iteration = 0
        while True:
            try:
                item = self._outbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                yield worker_message_to_message(self._heartbeat(iteration))
                continue
            match item:
                case _Close():
                    return
                case Report():
                    iteration = item.iteration
                    lines = tuple(event_to_json(event) for event in item.events)
                    progress = EngineProgress(
                        time.monotonic(),
                        iteration,
                        item.refreshed,
                        item.ended,
                        lines,
                        reserved=item.reserved,
                        handed_over=item.handed_over,
                    )
                    yield worker_message_to_message(progress)
                case _:
                    yield worker_message_to_message(item)

    def _heartbeat(self, iteration: int) -> EngineProgress:
        now_s, began_s = time.monotonic(), self._iteration_began_s
        age_s = None if began_s is None else max(0.0, now_s - began_s)
        return EngineProgress(now_s, iteration, iteration_age_s=age_s)


def _ended_by(error: object, *, is_secure: bool) -> StreamEnded:
    """With what the other side said; gRPC's errors are also calls, which their declared type hides."""
    if not isinstance(error, grpc.Call):
        return StreamEnded(one_line(str(error)))
    details = one_line(error.details() or str(error.code()))
    if found := mismatch(details, is_secure=is_secure):
        return StreamEnded(f"the server is not available: {found.meaning}", found.is_certain)
    return StreamEnded(details, error.code() in REFUSALS)
