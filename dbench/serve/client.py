"""The asynchronous gRPC client of a dbench server; every gRPC error becomes one of dbench's own here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from dbench.errors import OptionError, QueueFullError, RequestError, ServerError, ServerUnavailable
from dbench.events import Event, event_from_json
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.proto.dbench_pb2_grpc import DbenchStub
from dbench.serve.tls import channel_credentials, mismatch
from dbench.serve.wire import (
    AUTHORIZATION,
    MAX_MESSAGE_BYTES,
    Accepted,
    FinishedBlock,
    GenerateReply,
    PollState,
    ServerStatus,
    Submission,
    bearer,
    event_lines_from_message,
    generate_reply_from_message,
    poll_state_from_message,
    server_status_from_message,
    submission_to_message,
)

CALL_TIMEOUT_S = 30.0
"""Of calls that a living server answers at once."""
READY_POLL_S = 0.1
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.use_local_subchannel_pool", 1),  # clients of one process do not share a connection
    ("grpc.enable_http_proxy", 0),
)
"""No proxy: gRPC would send even calls to 127.0.0.1 to the http_proxy of the environment, which mostly cannot reach
back; and latency through a proxy would be measured as the server's."""

logger = logging.getLogger(__name__)


class Client:
    """`async with Client("127.0.0.1:50051") as client:`; every method raises as `_errors` says."""

    def __init__(self, address: str, api_key: str | None = None, tls_ca: str | None = None) -> None:
        self._address = address
        self._api_key = api_key
        self._tls_ca = tls_ca
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> Client:
        """Connects at the first call. Raises OptionError for an API key that cannot be sent and a useless tls_ca."""
        if self._api_key is not None:
            self._metadata = ((AUTHORIZATION, bearer(self._api_key)),)
        if self._tls_ca is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        else:
            credentials = channel_credentials(self._tls_ca)
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=CHANNEL_OPTIONS)
        self._stub = DbenchStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def status(self) -> ServerStatus:
        with self._errors():
            return server_status_from_message(await self._call("GetServerStatus", pb.ServerStatusRequest()))

    async def wait_until_ready(self, timeout_s: float) -> ServerStatus:
        """The status once the server is ready for requests; ServerUnavailable after `timeout_s`.

        A server that does not answer at all is not waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (status := await self.status()).ready_for_requests:
            if time.monotonic() >= deadline_s:
                raise ServerUnavailable(f"server {self._address} is not ready for requests after {timeout_s:g} s")
            await asyncio.sleep(READY_POLL_S)
        return status

    async def submit(self, submission: Submission) -> str:
        """The request id; poll or cancel with it."""
        with self._errors():
            reply = await self._call("Submit", submission_to_message(submission))
        return str(reply.request_id)

    async def generate(
        self, submission: Submission, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateReply, None]:
        """One Accepted, the finished blocks, one PollState. Ending the iteration early cancels the request.

        Wrap it in contextlib.aclosing where the loop may be left early.
        """
        with self._errors():
            message = submission_to_message(submission)
            call = self._stub.Generate(message, timeout=timeout_s, metadata=self._metadata)
            try:
                async for reply in call:
                    yield generate_reply_from_message(reply)
            finally:
                call.cancel()

    async def poll(self, request_id: str) -> PollState:
        """Status NOT_FOUND for an id that the server does not know."""
        with self._errors():
            return poll_state_from_message(await self._call("Poll", pb.PollRequest(request_id=request_id)))

    async def cancel(self, request_id: str) -> str:
        """The status after the call."""
        with self._errors():
            return str((await self._call("Cancel", pb.CancelRequest(request_id=request_id))).status)

    async def reset_metrics(self) -> float:
        """Let the server forget its events; returns the moment on the server's clock."""
        with self._errors():
            return float((await self._call("ResetMetrics", pb.ResetMetricsRequest())).now_s)

    async def export_events(self) -> AsyncGenerator[Event, None]:
        """The events since reset_metrics, on the server's clock, first how things stood at the reset."""
        with self._errors():
            has_warned = False
            call = self._stub.ExportMetrics(pb.ExportMetricsRequest(), metadata=self._metadata)
            try:
                async for message in call:
                    part = event_lines_from_message(message)
                    if part.num_forgotten and not has_warned:
                        has_warned = True
                        logger.warning("server %s has forgotten %d events", self._address, part.num_forgotten)
                    for line in part.lines:
                        yield event_from_json(line)
            finally:
                call.cancel()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """gRPC's errors as dbench's own.

        RequestError: refused. QueueFullError: too many requests. ServerUnavailable: nobody there, draining, gone, or
        not to be trusted. OptionError: the API key. ServerError: anything else.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address, is_secure=self._tls_ca is not None) from error

    async def _call(self, method: str, request: Any) -> Any:
        methods = {
            "GetServerStatus": self._stub.GetServerStatus,
            "Submit": self._stub.Submit,
            "Poll": self._stub.Poll,
            "Cancel": self._stub.Cancel,
            "ResetMetrics": self._stub.ResetMetrics,
        }
        return await methods[method](request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """One finished request, for `dbench submit`; durations in seconds."""

    request_id: str
    status: str
    token_ids: tuple[int, ...]
    """Generated ids; empty unless COMPLETED."""
    num_forward_passes: int
    error: str
    latency_s: float
    """From the call to the result, at the client."""
    time_to_first_block_s: float | None
    """From the call to the first finished block, at the client."""
    queue_s: float | None
    """From arrival to the first refresh, at the server."""
    server_s: float | None
    """From arrival to completion, at the server."""


async def submit_and_wait(
    client: Client, submission: Submission, on_block: Callable[[FinishedBlock], None] | None = None
) -> SubmitResult:
    """Send one request and wait for its end; `on_block` gets each block as it comes. Cancelling cancels."""
    start_s = time.monotonic()
    request_id, first_block_s, result = "", None, None
    async with aclosing(client.generate(submission)) as replies:
        async for reply in replies:
            match reply:
                case Accepted():
                    request_id = reply.request_id
                case FinishedBlock():
                    first_block_s = time.monotonic() if first_block_s is None else first_block_s
                    if on_block is not None:
                        on_block(reply)
                case PollState():
                    result = reply
    if result is None:
        raise ServerError(f"request {request_id}: the server ended the stream without a result")
    return SubmitResult(
        request_id=request_id,
        status=result.status,
        token_ids=result.generated_token_ids,
        num_forward_passes=result.num_forward_passes,
        error=result.error_message,
        latency_s=time.monotonic() - start_s,
        time_to_first_block_s=_since(start_s, first_block_s),
        queue_s=_since(result.arrival_s, result.first_refresh_s),
        server_s=_since(result.arrival_s, result.completion_s),
    )


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s


def _translated(error: grpc.aio.AioRpcError, address: str, *, is_secure: bool) -> Exception:
    code, details = error.code(), " ".join((error.details() or "").split())
    found = mismatch(details, is_secure=is_secure)
    match code:
        case grpc.StatusCode.UNAVAILABLE if found is not None:
            return ServerUnavailable(f"server {address} is not available: {found.meaning}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return RequestError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return RequestError(f"request: {details}; a message may have {MAX_MESSAGE_BYTES} bytes")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return QueueFullError(details)
        case grpc.StatusCode.UNAUTHENTICATED:
            return OptionError(f"api_key: server {address} says: {details}")
        case grpc.StatusCode.UNAVAILABLE:
            return ServerUnavailable(
                f"server {address} is not available: {details}; start one with 'dbench serve', or check host:port"
            )
        case grpc.StatusCode.CANCELLED:
            return ServerUnavailable(f"server {address} broke off the call: {details}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServerUnavailable(f"server {address} did not answer in time")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ServerUnavailable(f"server {address} is no dbench server of this version: {details}")
        case _:
            return ServerError(f"server {address}: {code.name}: {details}")
