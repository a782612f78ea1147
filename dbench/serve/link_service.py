"""The gRPC service that workers dial: one stream per worker, commands down, progress up."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from dbench import __version__
from dbench.options import HYBRID, PREFILL, WORKER_KINDS, EngineOptions
from dbench.serve.fleet import WorkerPhase
from dbench.serve.hub import Hub, Link
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.proto.dbench_pb2_grpc import WorkerLinkServicer
from dbench.serve.wire import WorkerStatus
from dbench.serve.wire_link import (
    EngineProgress,
    Fatal,
    Hello,
    Leaving,
    Ready,
    Welcome,
    WorkerMessage,
    command_to_message,
    worker_message_from_message,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

LAST_WRITE_TIMEOUT_S = 1.0
AWAY = frozenset(phase.value for phase in WorkerPhase if phase.is_away)
COLOCATED_ONLY = (
    "this server is in colocated mode and takes no prefill worker; start the worker with --worker-type colocated, "
    "or the server with --mode hybrid"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerTerms:
    """Who may work for this server, and what all its workers are told."""

    worker_key: str = field(repr=False)
    takes_remote: bool
    """Also workers that it has not started itself."""
    engine: EngineOptions
    model_fingerprint: str
    meeting_address: str = ""
    """Of the store at which workers meet that exchange KV; empty in colocated mode."""

    def welcome(self, worker_id: int, kind: str) -> Welcome:
        return Welcome(worker_id, self.engine, self.model_fingerprint, kind, self.meeting_address)

    def fault_of(self, hello: Hello, workers: Sequence[WorkerStatus]) -> str:
        """Why a worker from elsewhere cannot work beside these, in words; empty if it can."""
        if hello.kind not in WORKER_KINDS:
            return f"the kind of a worker: got {hello.kind!r}, wanted one of {', '.join(WORKER_KINDS)}"
        if self.engine.mode != HYBRID:
            return COLOCATED_ONLY if hello.kind == PREFILL else ""
        for worker in workers:
            if worker.state not in AWAY and _is_cpu(worker.device) != _is_cpu(hello.device):
                return (
                    f"in hybrid mode KV goes from CPU to CPU or from GPU to GPU: got {hello.device}, "
                    f"worker {worker.worker_id} has {worker.device}"
                )
        return ""


class WorkerLinkService(WorkerLinkServicer):
    """Takes in workers that know the key; the end of a stream is the end of its worker."""

    def __init__(self, hub: Hub, terms: WorkerTerms) -> None:
        self._hub = hub
        self._terms = terms

    async def Connect(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Context) -> None:
        messages = aiter(request_iterator)
        hello = await self._admit(await anext(messages, None), context)
        assert hello.worker_id is not None, "a worker that was taken in has its id"
        link = self._hub.connect(hello.worker_id)
        link.commands.put_nowait(self._terms.welcome(hello.worker_id, self._hub.kind_of(hello.worker_id)))
        writer = asyncio.create_task(_write(link, context))
        reader = asyncio.create_task(self._read(messages, hello, hello.worker_id, link))
        closed = asyncio.create_task(link.closed.wait())
        try:
            await asyncio.wait([reader, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            self._hub.link_ended(hello.worker_id, link, "its stream ended")
        await asyncio.wait([writer], timeout=LAST_WRITE_TIMEOUT_S)

    async def _read(self, messages: AsyncIterator[pb.WorkerMessage], hello: Hello, worker_id: int, link: Link) -> None:
        """Take messages in until the stream or its worker has ended.

        It must not be cancelled: gRPC writes into memory of a read that nobody waits for any more. The end
        of the call ends it.
        """
        try:
            async for message in messages:
                if link.closed.is_set():
                    return
                self._take(hello, worker_id, worker_message_from_message(message))
                if worker_id in self._hub.fatal_errors:
                    return
        except ValueError as error:
            self._hub.link_ended(worker_id, link, f"it sent something that makes no sense: {error}")
        except Exception as error:
            logger.debug("the stream of worker %d cannot be read: %s", worker_id, error)

    async def _admit(self, first: pb.WorkerMessage | None, context: Context) -> Hello:
        """The Hello of a worker that may work here, with its id; anybody else's call is aborted."""
        try:
            hello = worker_message_from_message(first if first is not None else pb.WorkerMessage())
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not isinstance(hello, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker's first message is its hello")
        if hello.worker_id is None and not self._terms.takes_remote:
            reason = "this server takes no workers from elsewhere; start it with --worker-key"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if not hmac.compare_digest(hello.worker_key.encode(), self._terms.worker_key.encode()):
            logger.warning("a worker at %s was refused: wrong worker key", context.peer())
            reason = "wrong worker key; give the one that the server was started with"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        if hello.version != __version__:
            reason = f"the worker is dbench {hello.version}, the server {__version__}; install the same version"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if hello.worker_id is not None:
            if not self._hub.is_expected(hello.worker_id):
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"worker {hello.worker_id} is not expected")
            return hello
        if fault := self._terms.fault_of(hello, self._hub.worker_statuses()):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fault)
        if self._hub.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining and takes no workers")
        return self._hub.join(hello)

    def _take(self, hello: Hello, worker_id: int, message: WorkerMessage) -> None:
        """Raises ValueError for a message that has no place here."""
        match message:
            case EngineProgress():
                self._hub.progress(worker_id, message)
            case Ready():
                self._hub.worker_ready(hello, message)
            case Fatal(error):
                self._hub.fatal_errors[worker_id] = error
            case Leaving():
                self._hub.worker_leaves(worker_id)
            case Hello():
                raise ValueError("a second hello")


def _is_cpu(device: str) -> bool:
    return device.startswith("cpu")


async def _write(link: Link, context: Context) -> None:
    """Send commands until None comes or the stream breaks, which its reader notices too.

    It must not be cancelled: gRPC cannot end a call, and the worker would wait for ever, while a write that
    nobody waits for any more is under way.
    """
    try:
        while (command := await link.commands.get()) is not None:
            await context.write(command_to_message(command))
    except Exception as error:
        logger.debug("the stream of a worker cannot be written: %s", error)
