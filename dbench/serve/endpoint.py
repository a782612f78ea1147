"""The gRPC server: which address it binds, which services answer there, and whether health says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from dbench.errors import OptionError, one_line
from dbench.options import ServiceOptions
from dbench.serve.address import LOOPBACK, address_fault, from_this_machine, join_host_port
from dbench.serve.client_service import SERVICE_NAME, ApiKeyInterceptor, ClientService
from dbench.serve.hub import Hub
from dbench.serve.link_service import WorkerLinkService, WorkerTerms
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.proto.dbench_pb2_grpc import add_DbenchServicer_to_server, add_WorkerLinkServicer_to_server
from dbench.serve.tls import is_secure, server_credentials, tls_fault
from dbench.serve.wire import MAX_MESSAGE_BYTES, ServerStatus, bearer

LINK_SERVICE: str = pb.DESCRIPTOR.services_by_name["WorkerLink"].full_name
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # or a second server could share the port in silence
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


def check_address(service: ServiceOptions) -> None:
    """Raises OptionError for an address that must not be bound or whose port is taken, and for useless TLS files."""
    fault = tls_fault(service) or address_fault(service)
    if fault is not None:
        raise OptionError(fault.line)


class Endpoint:
    """Between `start` and `stop` it answers at `address`.

    With TLS, the workers of this machine get a port of their own on loopback, without it, where nothing but their
    streams is served: they depend neither on the names in the certificate nor on the day on which it expires.
    """

    def __init__(
        self, hub: Hub, service: ServiceOptions, terms: WorkerTerms, describe: Callable[[], ServerStatus]
    ) -> None:
        self._hub = hub
        self._service = service
        self._terms = terms
        self._describe = describe
        self._health = health_aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._port = 0
        self._local_address = ""

    @property
    def address(self) -> str:
        """host:port for clients."""
        return join_host_port(self._service.host, self._port)

    @property
    def local_address(self) -> str:
        """host:port for workers on this machine."""
        return self._local_address

    async def start(self) -> None:
        """Bind and answer, with health NOT_SERVING. Raises OptionError, with nothing bound."""
        check_address(self._service)
        try:
            await self._start()
        except BaseException:
            await self.stop(0)
            raise

    async def _start(self) -> None:
        key = self._service.api_key
        interceptors = [] if key is None else [ApiKeyInterceptor(bearer(key))]
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
        add_DbenchServicer_to_server(ClientService(self._hub, self._describe), server)  # type: ignore[no-untyped-call]
        add_WorkerLinkServicer_to_server(WorkerLinkService(self._hub, self._terms), server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, LINK_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self.set_serving(False)
        self._port = self._bind(server)
        self._servers.append(server)
        await server.start()
        self._local_address = join_host_port(from_this_machine(self._service.host), self._port)
        if is_secure(self._service):
            await self._start_local()

    def _bind(self, server: grpc.aio.Server) -> int:
        host, port = self._service.host, self._service.scheduler_port
        address = join_host_port(host, port)
        try:
            if is_secure(self._service):
                return server.add_secure_port(address, server_credentials(self._service))
            return server.add_insecure_port(address)
        except RuntimeError as error:
            check_address(self._service)  # taken since the last look
            raise OptionError(f"scheduler_port: {port} on {host} cannot be bound: {one_line(error)}") from error

    async def _start_local(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_WorkerLinkServicer_to_server(WorkerLinkService(self._hub, self._terms), server)  # type: ignore[no-untyped-call]
        try:
            port = server.add_insecure_port(join_host_port(LOOPBACK, 0))
        except RuntimeError as error:
            raise OptionError(f"host: no port on {LOOPBACK} for the workers: {one_line(error)}") from error
        self._local_address = join_host_port(LOOPBACK, port)
        self._servers.append(server)
        await server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service says, for the server and for its client service."""
        kinds = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, kinds.SERVING if is_serving else kinds.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Answer no new call, and give running ones `grace_s` to end."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
