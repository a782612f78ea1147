"""Where a server may be reached: which addresses need a word, and whether a port is free."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from dbench.options import ServiceOptions


@dataclass(frozen=True, slots=True)
class AddressFault:
    """Why an address cannot be served at."""

    option: str
    """host or scheduler_port."""
    got: str
    wanted: str

    @property
    def line(self) -> str:
        return f"{self.option}: got {self.got}, wanted {self.wanted}"


def address_fault(service: ServiceOptions) -> AddressFault | None:
    """What stands against the address of these options at this moment, or None."""
    host, port = service.host, service.scheduler_port
    if not is_loopback(host) and not service.allow_insecure_bind:
        return AddressFault(
            "host", repr(host), "a loopback address such as 127.0.0.1, or --allow-insecure-bind to serve without TLS"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return AddressFault(
                "scheduler_port", f"{port}, which is in use on {host}", "a free port, or 0 for any free one"
            )
        if error.errno == errno.EACCES:
            return AddressFault("scheduler_port", str(port), "a port that this user may bind (1024 or above)")
        return AddressFault("host", f"{host!r} ({error.strerror or error})", "an address of this machine")
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
