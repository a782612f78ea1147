"""The gRPC service that clients call, and the key that they must send."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

from dbench.errors import DbenchError, QueueFullError, RequestError, ServerUnavailable
from dbench.serve.hub import Hub
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.proto.dbench_pb2_grpc import DbenchServicer
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire import (
    AUTHORIZATION,
    Accepted,
    GenerateReply,
    ServerStatus,
    Submission,
    event_lines_to_message,
    generate_reply_to_message,
    poll_state_to_message,
    server_status_to_message,
    submission_from_message,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

STATUS_CODES: dict[type[DbenchError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ServerUnavailable: grpc.StatusCode.UNAVAILABLE,
}
"""How a refused submission looks on the wire; the details are the error's line."""

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Dbench"].full_name


class ClientService(DbenchServicer):
    """Translates calls into calls of the hub."""

    def __init__(self, hub: Hub, describe: Callable[[], ServerStatus]) -> None:
        self._hub = hub
        self._describe = describe

    async def Submit(self, request: pb.GenerationRequest, context: Context) -> pb.SubmitReply:
        tracked = await self._submit(submission_from_message(request), context)
        return pb.SubmitReply(request_id=tracked.request.request_id)

    async def Poll(self, request: pb.PollRequest, context: Context) -> pb.PollReply:
        return poll_state_to_message(self._hub.poll(request.request_id))

    async def Generate(self, request: pb.GenerationRequest, context: Context) -> None:
        """Writes the accepted id, then finished blocks, then the result; ending early cancels."""
        tracked = await self._submit(submission_from_message(request), context)
        request_id = tracked.request.request_id

        async def reply(record: GenerateReply) -> None:
            await context.write(generate_reply_to_message(record))

        try:
            with self._hub.watch(request_id) as changed:
                await reply(Accepted(request_id))
                num_sent = 0
                while True:
                    is_final = tracked.status.is_final
                    for block in tracked.finished_blocks(num_sent):
                        await reply(block)
                        num_sent += 1
                    if is_final:
                        await reply(self._hub.result(tracked))
                        return
                    await changed.wait()
                    changed.clear()
        finally:
            self._hub.cancel(request_id, "the client went away or its deadline passed")

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        return pb.CancelReply(status=self._hub.cancel(request.request_id, "cancelled by the client"))

    async def GetServerStatus(self, request: pb.ServerStatusRequest, context: Context) -> pb.ServerStatusReply:
        return server_status_to_message(self._describe())

    async def ResetMetrics(self, request: pb.ResetMetricsRequest, context: Context) -> pb.ResetMetricsReply:
        return pb.ResetMetricsReply(now_s=self._hub.reset_metrics())

    async def ExportMetrics(self, request: pb.ExportMetricsRequest, context: Context) -> None:
        for part in self._hub.export():
            await context.write(event_lines_to_message(part))

    async def _submit(self, submission: Submission, context: Context) -> TrackedRequest:
        try:
            return self._hub.submit(submission)
        except tuple(STATUS_CODES) as error:
            await _abort(context, error)


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of the client service whose authorization is not the wanted one."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        is_ours = handler_call_details.method.startswith(f"/{SERVICE_NAME}/")
        if handler is None or not is_ours or self._is_authorized(handler_call_details):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _is_authorized(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION]
        texts = [value.encode() if isinstance(value, str) else value for value in given]
        return any(hmac.compare_digest(text, self._wanted) for text in texts)


async def _refuse(request: bytes, context: Context) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "missing or wrong API key; send the one that the server was started with"
    )


async def _abort(context: Context, error: DbenchError) -> NoReturn:
    code = next(code for kind, code in STATUS_CODES.items() if isinstance(error, kind))
    await context.abort(code, str(error))
