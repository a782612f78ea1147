"""TLS on the port of a server: who gets through, who is told why not, and what the workers of its machine need."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbench.errors import OptionError, ServerUnavailable
from dbench.options import ServiceOptions
from dbench.serve.address import address_fault
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.endpoint import Endpoint
from dbench.serve.server import say_who_is_awaited
from dbench.serve.tls import tls_fault
from dbench.serve.wire import Submission
from tests.serve.process_builders import assert_all_end, family_of, launch, wait_for
from tests.serve.remote_builders import (
    ENVIRONMENT,
    address_of,
    at_free_port,
    is_bindable,
    lines_with,
    worker_process,
)
from tests.serve.server_builders import WORKER_KEY, ServerInThisProcess, run
from tests.serve.tls_builders import Pair, self_signed, signed_by, with_passphrase

WANT = Submission((1, 2, 3), 8)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return self_signed(tmp_path)


async def complaint(call: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(ServerUnavailable) as raised:
        await call
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def status_of(address: str, tls_ca: str | None) -> str:
    """The name of the model that a server serves."""
    async with Client(address, tls_ca=tls_ca) as client:
        return (await client.status()).model


def dbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "dbench", *arguments)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def test_requests_and_workers_of_both_kinds_go_through_tls(pair: Pair, tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        async with Client(address, tls_ca=pair.cert) as client:
            results = await asyncio.gather(*(submit_and_wait(client, WANT) for _ in range(8)))
            assert [result.status for result in results] == ["COMPLETED"] * 8
            assert [worker.ready for worker in (await client.status()).workers] == [True, True]

    with launch(worker_key=WORKER_KEY, **pair.options) as server:
        family = family_of(server.pid)
        with worker_process(server.address, tmp_path, "--tls-ca", pair.cert) as worker:
            assert worker.wait_until_ready() == f"ready as worker 1 of {server.address}"
            run(scenario(server.address))
    assert_all_end(family)


def test_the_commands_that_dial_a_server_speak_tls(pair: Pair, tmp_path: Path) -> None:
    with launch(**pair.options) as server:
        where = ("--server", server.address, "--tls-ca", pair.cert)
        sent = dbench("submit", *where, "--prompt-ids", "1,2,3", "--gen-length", "4")
        assert (sent.returncode, "COMPLETED" in sent.stderr) == (0, True)
        lengths = ("--prompt-tokens", "8", "--gen-tokens", "4", "--num-requests", "2", "--num-warmup-requests", "0")
        ran = dbench("run", *where, *lengths, "--qps", "inf", "--output-dir", str(tmp_path), "--no-dashboard")
        assert ran.returncode == 0, ran.stderr
        refused = dbench("submit", "--server", server.address, "--prompt-ids", "1,2,3")
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "give --tls-ca" in refused.stderr


def test_the_command_for_an_awaited_worker_is_one_that_the_server_understands(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServiceOptions(num_remote_workers=1, num_remote_prefill_workers=2)
    with caplog.at_level(logging.INFO):
        say_who_is_awaited(options, "10.0.0.1:50051")
        say_who_is_awaited(replace(options, **pair.options), "10.0.0.1:50051")
    beginning = "dbench worker --scheduler 10.0.0.1:50051"
    assert [record.getMessage().partition("; there: ")[2] for record in caplog.records] == [
        beginning,
        f"{beginning} --worker-type prefill",
        f"{beginning} --tls-ca FILE",
        f"{beginning} --tls-ca FILE --worker-type prefill",
    ]


def test_a_certificate_of_an_authority_is_trusted_by_either_of_the_two(tmp_path: Path) -> None:
    authority = self_signed(tmp_path, "authority", "DNS:authority.example")
    signed = signed_by(authority, tmp_path)

    async def scenario() -> None:
        async with ServerInThisProcess(**signed.options) as server:
            for trusted in (authority.cert, signed.cert):
                assert await status_of(server.endpoint.address, trusted) == "embedded"

    run(scenario())


def test_a_server_is_dialled_by_any_name_of_its_certificate_and_by_no_other(tmp_path: Path) -> None:
    by_name = self_signed(tmp_path, "by-name", "DNS:localhost")

    async def scenario() -> None:
        async with ServerInThisProcess(**by_name.options) as server:
            host, _, port = server.endpoint.address.rpartition(":")
            assert await status_of(f"localhost:{port}", by_name.cert) == "embedded"
            assert "its certificate is for other names" in await complaint(status_of(f"{host}:{port}", by_name.cert))

    run(scenario())


def test_whoever_does_not_fit_the_server_is_told_why(pair: Pair, tmp_path: Path) -> None:
    other = self_signed(tmp_path, "other")

    async def scenario() -> None:
        async with ServerInThisProcess(**pair.options) as server:
            address = server.endpoint.address
            assert "a server that speaks TLS does so: give --tls-ca" in await complaint(status_of(address, None))
            assert "is not among those of tls_ca" in await complaint(status_of(address, other.cert))
        async with ServerInThisProcess() as server:
            line = await complaint(status_of(server.endpoint.address, pair.cert))
            assert "it does not speak TLS; leave tls_ca out" in line

    run(scenario())


def test_a_useless_tls_ca_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^tls_ca: got '/no/such/file' \(No such file or directory\), wanted a file"):
        run(status_of("127.0.0.1:1", "/no/such/file"))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(OptionError, match=r"^tls_ca: got '.*empty.pem', which holds no certificate, wanted"):
        run(status_of("127.0.0.1:1", str(tmp_path / "empty.pem")))


def test_a_worker_that_does_not_fit_the_server_is_told_why(pair: Pair, tmp_path: Path) -> None:
    other = self_signed(tmp_path, "other")

    async def scenario() -> None:
        async with ServerInThisProcess(worker_key=WORKER_KEY, **pair.options) as server:
            address = server.endpoint.address
            with worker_process(address, tmp_path, "--tls-ca", other.cert) as worker:
                assert await asyncio.to_thread(worker.exit_code) == 2
                assert "is not among those of tls_ca" in worker.last_line()
            with worker_process(address, tmp_path) as worker:
                wants = "give --tls-ca, the file with its certificate; the worker dials again"
                await asyncio.to_thread(wait_for, lambda: bool(lines_with(worker.log, wants)))
        async with ServerInThisProcess(worker_key=WORKER_KEY) as server:
            with worker_process(server.endpoint.address, tmp_path, "--tls-ca", pair.cert) as worker:
                assert await asyncio.to_thread(worker.exit_code) == 2
                assert "it does not speak TLS" in worker.last_line()

    run(scenario())


def test_the_port_for_workers_of_this_machine_serves_no_clients(pair: Pair) -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(**pair.options) as server:
            address = server.endpoint.local_address
            assert address.startswith("127.0.0.1:")
            assert address != server.endpoint.address
            assert "is no dbench server of this version" in await complaint(status_of(address, None))

    run(scenario())


def test_a_server_that_cannot_serve_its_own_workers_leaves_no_port(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(endpoint: Endpoint) -> None:
        raise OptionError("host: no port on 127.0.0.1 for the workers")

    async def scenario() -> None:
        with pytest.raises(OptionError, match="for the workers"):
            await server.endpoint.start()

    service = at_free_port(**pair.options)
    server = ServerInThisProcess(scheduler_port=service.scheduler_port, **pair.options)
    monkeypatch.setattr(Endpoint, "_start_local", fail)
    run(scenario())
    assert is_bindable(address_of(service))


def test_tls_is_enough_for_an_address_beyond_this_machine(pair: Pair) -> None:
    service = ServiceOptions(host="0.0.0.0", scheduler_port=0, tls_cert=pair.cert, tls_key=pair.key)
    assert address_fault(service) is None


def test_files_that_make_no_tls_are_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    other, encrypted = self_signed(tmp_path, "other"), with_passphrase(pair, tmp_path)
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    noise = str(tmp_path / "noise")

    def fault_of(cert: str | None, key: str | None) -> str:
        fault = tls_fault(ServiceOptions(tls_cert=cert, tls_key=key))
        return "" if fault is None else fault.line

    assert fault_of(None, None) == fault_of(pair.cert, pair.key) == ""
    assert fault_of(pair.cert, None).startswith("tls_key: got nothing, wanted")
    assert fault_of(None, pair.key).startswith("tls_cert: got nothing, wanted")
    assert fault_of("/no/cert", pair.key).startswith("tls_cert: got '/no/cert' (No such file or directory)")
    assert fault_of(pair.cert, "/no/key").startswith("tls_key: got '/no/key' (No such file or directory)")
    assert fault_of(str(tmp_path), pair.key).startswith(f"tls_cert: got '{tmp_path}' (")
    for wrong in (noise, pair.key):
        assert fault_of(wrong, pair.key).startswith(f"tls_cert: got '{wrong}', which holds no certificate")
    for wrong in (noise, pair.cert, encrypted):
        assert fault_of(pair.cert, wrong).startswith(f"tls_key: got '{wrong}', which holds no such key")
    assert fault_of(pair.cert, other.key) == (
        f"tls_key: got '{other.key}', the key of another certificate, wanted that of tls_cert '{pair.cert}'"
    )


def test_serve_refuses_them_before_it_starts_anything(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    refused = dbench("serve", "--tls-cert", pair.cert, "--scheduler-port", "0", "--metrics-output-dir", str(folder))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("dbench: error: --tls-key: got nothing, wanted")
    assert not folder.exists()


def test_a_run_on_a_server_of_its_own_takes_no_tls_ca(pair: Pair) -> None:
    refused = dbench("run", "--tls-ca", pair.cert)
    assert refused.returncode == 2
    assert "--tls-ca: given without --server" in refused.stderr
