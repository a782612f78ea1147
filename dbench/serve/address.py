"""Where a server may be reached: which addresses need a word, and whether a port is free."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from dbench.options import ServiceOptions

LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address that means all of them -> where this machine reaches itself."""


@dataclass(frozen=True, slots=True)
class AddressFault:
    """Why a server cannot be reached as its options say."""

    option: str
    """The one at fault."""
    got: str
    wanted: str

    @property
    def line(self) -> str:
        return f"{self.option}: got {self.got}, wanted {self.wanted}"


def address_fault(service: ServiceOptions) -> AddressFault | None:
    """What stands against the address of these options at this moment, or None."""
    host, port = service.host, service.scheduler_port
    if not is_loopback(host) and service.tls_cert is None and not service.allow_insecure_bind:
        wanted = "a loopback address such as 127.0.0.1, or --tls-cert, or --allow-insecure-bind to serve without TLS"
        return AddressFault("host", repr(host), wanted)
    return bind_fault("host", host, "scheduler_port", port)


def meeting_fault(service: ServiceOptions) -> AddressFault | None:
    """The same for the address at which workers that exchange KV meet; it has no key of its own."""
    host, port = service.master_addr, service.master_port
    if not is_loopback(host) and not service.allow_insecure_bind:
        wanted = "a loopback address such as 127.0.0.1, or --allow-insecure-bind: KV goes without TLS, always"
        return AddressFault("master_addr", repr(host), wanted)
    if service.worker_key is not None and not is_loopback(service.host) and not _is_reachable(host):
        wanted = "the address at which the workers of other hosts that may join reach this machine"
        return AddressFault("master_addr", repr(host), wanted)
    if port and port == service.scheduler_port:
        return AddressFault(
            "master_port", f"{port}, which is scheduler_port too", "another port, or 0 for any free one"
        )
    return bind_fault("master_addr", host, "master_port", port)


def board_host(service: ServiceOptions) -> str:
    """Where the server's workers show their health and metrics, which goes without TLS and without a key."""
    return service.host if is_loopback(service.host) or service.allow_insecure_bind else LOOPBACK


def worker_ports_fault(service: ServiceOptions, num_workers: int, *, is_hybrid: bool) -> AddressFault | None:
    """The same for the ports of the workers' health and metrics, one after another from base_worker_port."""
    base = service.base_worker_port
    others = {service.scheduler_port: "scheduler_port"} | ({service.master_port: "master_port"} if is_hybrid else {})
    for port in range(base, base + num_workers) if base else ():
        if port > LAST_PORT:
            return AddressFault(
                "base_worker_port", str(base), f"at most {LAST_PORT - num_workers + 1} for {num_workers} workers"
            )
        if port in others:
            wanted = "ports of their own for the workers, or 0 for any free ones"
            got = str(base) if port == base else f"{base}, and so {port}"
            return AddressFault("base_worker_port", f"{got}, which is {others[port]} too", wanted)
        fault = bind_fault("host", board_host(service), "base_worker_port", port)
        if fault is not None:
            return fault
    return None


def listen_on(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A listening socket on this address alone. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def bind_fault(host_option: str, host: str, port_option: str, port: int) -> AddressFault | None:
    """What stands against listening there at this moment, or None."""
    try:
        listen_on(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return AddressFault(port_option, f"{port}, which is in use on {host}", "a free port, or 0 for any free one")
        if error.errno == errno.EACCES:
            return AddressFault(port_option, str(port), "a port that this user may bind (1024 or above)")
        return AddressFault(host_option, f"{host!r} ({error.strerror or error})", "an address of this machine")
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_reachable(host: str) -> bool:
    """Whether another host that dials this address may get here; at loopback and 0.0.0.0 it finds itself."""
    try:
        return not (is_loopback(host) or ipaddress.ip_address(host).is_unspecified)
    except ValueError:
        return not is_loopback(host)


def is_host_port(text: str) -> bool:
    """Whether it names a host and a port, as 'localhost:50051' or '[::1]:50051' do."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) <= LAST_PORT


def from_this_machine(host: str) -> str:
    """Where this machine reaches a server of its own that listens on the host, which may mean all its addresses."""
    return WILDCARDS.get(host, host)


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
