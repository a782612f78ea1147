"""Servers as processes: how they start, how they end, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dbench.errors import ServerStartError, ServerUnavailable
from dbench.models import embedded_directory
from dbench.progress import ServeProgress, ServerState
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.deployment import deployment_of
from dbench.serve.handover import ServerConfig, WorkerConfig
from dbench.serve.sequence import SamplingParameters
from dbench.serve.server import Observer, Stop, run_server
from dbench.serve.wire import Accepted, Submission
from tests.serve.process_builders import answer, assert_all_end, family_of, launch, server_child
from tests.serve.server_builders import eventually, final_state, options, run

SLOW = SamplingParameters("conf_quota", fixed_unmask_quota=1)


def test_leaving_the_block_drains_and_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "new" / "server.log"
    with launch(log, gpus="cpu,cpu") as server:
        was_alive = server.is_alive
        family = family_of(server.pid)
        assert len(family) == 3

        async def scenario() -> None:
            async with Client(server.address) as client:
                assert (await submit_and_wait(client, Submission((1, 2, 3), 4))).status == "COMPLETED"

        run(scenario())
    assert (was_alive, server.is_alive) == (True, False)
    assert_all_end(family)
    assert "draining" in log.read_text()


def test_sigterm_lets_running_requests_end() -> None:
    async def scenario(process: subprocess.Popen[str], address: str) -> None:
        async with Client(address) as client:
            want = Submission((1, 2, 3), 128, SLOW, ignore_eos=True)
            replies = client.generate(want)
            assert isinstance(await anext(replies), Accepted)
            process.send_signal(signal.SIGTERM)

            async def is_refused() -> bool:
                try:
                    await client.submit(Submission((1,), 4))
                except ServerUnavailable as error:
                    return "draining" in str(error)
                return False

            await eventually(is_refused)
            *_, result = [reply async for reply in replies]
            assert getattr(result, "status", None) == "COMPLETED"

    with server_child() as process:
        address = answer(process)["address"]
        family = family_of(process.pid)
        run(scenario(process, address))
        assert process.wait(60) == 0
        assert_all_end(family)


def test_requests_that_outlast_the_drain_are_cancelled_with_the_reason() -> None:
    async def scenario(process: subprocess.Popen[str], address: str) -> None:
        async with Client(address) as client:
            want = Submission((1, 2, 3), 248, SLOW, ignore_eos=True)
            replies = client.generate(want)
            assert isinstance(await anext(replies), Accepted)
            process.send_signal(signal.SIGINT)
            *_, result = [reply async for reply in replies]
            assert getattr(result, "status", None) == "CANCELLED"
            assert "drain_timeout_s 0" in getattr(result, "error_message", "")

    with server_child(drain_timeout_s=0.0) as process:
        address = answer(process)["address"]
        family = family_of(process.pid)
        run(scenario(process, address))
        assert process.wait(60) == 130
        assert_all_end(family)


def test_a_second_interrupt_ends_a_drain_at_once() -> None:
    async def scenario(process: subprocess.Popen[str], address: str) -> None:
        async with Client(address) as client:
            request_id = await client.submit(Submission((1, 2, 3), 248, SLOW, ignore_eos=True))
            process.send_signal(signal.SIGINT)

            async def is_draining() -> bool:
                return not (await client.status()).ready_for_requests

            await eventually(is_draining)
            assert not (await client.poll(request_id)).completion_s
            process.send_signal(signal.SIGINT)

    with server_child(drain_timeout_s=1000.0, max_tokens_per_iteration=4) as process:
        address = answer(process)["address"]
        family = family_of(process.pid)
        run(scenario(process, address))
        assert process.wait(60) == 130
        assert_all_end(family)


def test_no_worker_survives_a_killed_server() -> None:
    with launch(gpus="cpu,cpu") as server:
        family = family_of(server.pid)
        family[0].kill()
        assert_all_end(family)


def test_no_server_survives_a_killed_launcher(tmp_path: Path) -> None:
    engine, service, config_json = options()
    program = (
        "import sys, logging\n"
        "from dbench.serve.handover import ServerConfig\n"
        "from dbench.serve.launch import ServerProcess\n"
        "c = ServerConfig.from_json(sys.stdin.readline())\n"
        "with ServerProcess(c.engine, c.service, log_path=None, config_json=c.config_json) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        launcher.stdin.write(ServerConfig(engine, service, config_json, 20).to_json() + "\n")
        launcher.stdin.flush()
        family = family_of(int(launcher.stdout.readline()))
        assert len(family) == 2
    finally:
        launcher.kill()
        launcher.communicate()
    assert_all_end(family)


def test_a_busy_port_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, service, _ = options()
        with server_child(replace(service, scheduler_port=port)) as process:
            error = answer(process)["error"]
            assert f"scheduler_port: got {port}, which is in use on 127.0.0.1" in error
            assert "\n" not in error
            assert process.wait(60) == 2


def test_a_worker_that_cannot_load_its_model_fails_the_start_with_its_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_directory(), model)
    (model / "model.safetensors").unlink()
    server = launch(model=str(model))
    with pytest.raises(ServerStartError, match=r"worker 0 \(cpu\) did not start: .*safetensors"):
        server.__enter__()
    assert not server.is_alive


def test_workers_that_are_late_fail_the_start() -> None:
    engine, service, config_json = options(startup_timeout_s=0.01)
    with pytest.raises(ServerStartError, match=r"workers 0 \(colocated, starting\) were not ready within .* 0\.01"):
        run(run_server(deployment_of(engine), service, config_json, Stop(), Observer(lambda address: None)))


def test_before_its_workers_are_ready_a_server_queues_and_health_says_not_serving() -> None:
    engine, service, config_json = options(scheduler_port=0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        service = replace(service, scheduler_port=probe.getsockname()[1])
    address = f"127.0.0.1:{service.scheduler_port}"
    shown: list[ServeProgress] = []

    async def health(stub: health_pb2_grpc.HealthStub) -> int:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        return int(reply.status)

    async def scenario() -> None:
        stop = Stop()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        observer = Observer(ready.set_result, shown.append)
        server = asyncio.create_task(run_server(deployment_of(engine), service, config_json, stop, observer))
        async with grpc.aio.insecure_channel(address) as channel, Client(address) as client:
            stub = health_pb2_grpc.HealthStub(channel)
            assert await health(stub) == health_pb2.HealthCheckResponse.NOT_SERVING
            request_id = await client.submit(Submission((1, 2, 3), 4))
            assert (await client.poll(request_id)).status == "PENDING"
            assert await ready == address
            assert await health(stub) == health_pb2.HealthCheckResponse.SERVING
            assert (await final_state(client, request_id)).status == "COMPLETED"
            stop.on_terminate()
            assert await server == 0

    run(scenario())
    assert shown[0].state is ServerState.STARTING
    assert shown[0].workers[0].state == "starting"
    last = shown[-1]
    assert (last.state, last.num_completed, last.num_in_server) == (ServerState.ENDED, 1, 0)
    assert [worker.state for worker in last.workers] == ["ended"] * len(last.workers)


def test_a_stop_during_the_start_ends_the_start() -> None:
    engine, service, config_json = options()

    async def scenario() -> int:
        stop = Stop()
        stop.on_interrupt()
        return await run_server(deployment_of(engine), service, config_json, stop, Observer(lambda address: None))

    assert run(scenario()) == 130


def test_the_server_process_does_without_torch() -> None:
    program = "import sys, dbench.serve.server, dbench.serve.launch, dbench.serve.client; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_what_children_are_told_survives_the_pipe_and_hides_its_secrets() -> None:
    engine, service, config_json = options(api_key="sesame")
    server = ServerConfig(engine, service, config_json, 20)
    worker = WorkerConfig("127.0.0.1:1", "open", 3, "cpu", 2, 20, "127.0.0.1", 20103)
    assert ServerConfig.from_json(server.to_json()) == server
    assert WorkerConfig.from_json(worker.to_json()) == worker
    assert "sesame" not in repr(server)
    assert "open" not in repr(worker)
    assert "\n" not in server.to_json() + worker.to_json()
