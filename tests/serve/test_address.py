"""Which addresses a server is refused, and by which option's name."""

from __future__ import annotations

import socket

import pytest

from dbench.options import ServiceOptions
from dbench.serve.address import address_fault, board_host, is_loopback, join_host_port, worker_ports_fault


def fault_of(host: str = "127.0.0.1", port: int = 0, *, allowed: bool = False) -> str:
    fault = address_fault(ServiceOptions(host=host, scheduler_port=port, allow_insecure_bind=allowed))
    return "" if fault is None else fault.line


def test_free_port_of_this_machine_has_no_fault() -> None:
    assert fault_of() == ""
    assert fault_of("0.0.0.0", allowed=True) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_addresses_beyond_this_machine_need_a_word(host: str) -> None:
    assert fault_of(host).startswith(f"host: got {host!r}, wanted a loopback address")


def test_busy_port_is_named_with_its_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert fault_of(port=port) == (
            f"scheduler_port: got {port}, which is in use on 127.0.0.1, wanted a free port, or 0 for any free one"
        )


def test_address_of_another_machine_is_a_fault_of_the_host() -> None:
    assert fault_of("192.0.2.7", allowed=True).startswith("host: got '192.0.2.7' (")


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "192.0.2.7", "localhost.example"))


def test_ipv6_host_gets_brackets() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert join_host_port("127.0.0.1", 5) == "127.0.0.1:5"


def ports_fault(
    base: int, num_workers: int = 2, *, scheduler_port: int = 0, master_port: int = 0, is_hybrid: bool = True
) -> str:
    service = ServiceOptions(base_worker_port=base, scheduler_port=scheduler_port, master_port=master_port)
    fault = worker_ports_fault(service, num_workers, is_hybrid=is_hybrid)
    return "" if fault is None else fault.line


def test_ports_of_workers_are_their_own_and_free() -> None:
    assert ports_fault(0) == ports_fault(65534) == ports_fault(1, num_workers=0) == ""
    assert ports_fault(65535) == "base_worker_port: got 65535, wanted at most 65534 for 2 workers"
    taken_twice = "base_worker_port: got 50100, and so 50101, which is {} too, wanted"
    assert ports_fault(50100, scheduler_port=50101).startswith(taken_twice.format("scheduler_port"))
    assert ports_fault(50100, master_port=50101).startswith(taken_twice.format("master_port"))
    assert ports_fault(50100, master_port=50101, is_hybrid=False) == ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ports_fault(port - 1).startswith(f"base_worker_port: got {port}, which is in use on 127.0.0.1, wanted")


def test_figures_of_workers_leave_the_machine_only_where_that_is_allowed() -> None:
    assert board_host(ServiceOptions(host="::1")) == "::1"
    assert board_host(ServiceOptions(host="10.0.0.1", tls_cert="cert", tls_key="key")) == "127.0.0.1"
    assert board_host(ServiceOptions(host="10.0.0.1", allow_insecure_bind=True)) == "10.0.0.1"
