"""Real `dbench worker` processes: they join, leave, are killed, stand still, and outlive their server."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dbench.errors import ServerUnavailable
from dbench.events import WorkerLeft, WorkerLost, WorkerUp
from dbench.models import embedded_directory
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import answer, assert_all_end, family_of, launch, server_child, wait_for
from tests.serve.remote_builders import REMOTE, WorkerProcess, address_of, at_free_port, lines_with, worker_process
from tests.serve.server_builders import WORKER_KEY, ServerInThisProcess, events_of, eventually, final_state, run

SLOW = SamplingParameters("conf_quota", fixed_unmask_quota=1)
WANTS = [Submission(tuple(range(1, 30 + i)), 64, SLOW, request_seed=i, ignore_eos=True) for i in range(6)]


async def results_of(client: Client) -> list[tuple[int, ...]]:
    results = await asyncio.gather(*(submit_and_wait(client, want) for want in WANTS))
    assert [result.status for result in results] == ["COMPLETED"] * len(WANTS)
    return [result.token_ids for result in results]


async def has_states(client: Client, *states: str) -> None:
    async def are_there() -> bool:
        return [worker.state for worker in (await client.status()).workers] == list(states)

    await eventually(are_there)


async def is_working(client: Client, worker_id: int) -> None:
    async def works() -> bool:
        return (await client.status()).workers[worker_id].queue_depth_active > 0

    await eventually(works)


def test_workers_join_a_running_server_one_leaves_and_one_is_killed(tmp_path: Path) -> None:
    model = tmp_path / "copy"
    shutil.copytree(embedded_directory(), model)

    async def scenario(address: str) -> None:
        async with Client(address) as client:
            wanted = await results_of(client)
            with worker_process(address, tmp_path, "--model", str(model)) as leaver:
                assert await asyncio.to_thread(leaver.wait_until_ready) == f"ready as worker 1 of {address}"
                running = asyncio.ensure_future(results_of(client))
                await is_working(client, 1)
                leaver.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(leaver.exit_code) == 0
                assert await running == wanted
                await has_states(client, "idle", "ended")
                assert not [e for e in await events_of(client) if isinstance(e, WorkerLost)]
            with worker_process(address, tmp_path) as killed:
                assert await asyncio.to_thread(killed.wait_until_ready) == f"ready as worker 1 of {address}"
                running = asyncio.ensure_future(results_of(client))
                await is_working(client, 1)
                killed.process.kill()
                assert await running == wanted
                await has_states(client, "idle", "awaited")
                assert (await client.status()).workers[1].num_losses == 1
            assert lines_with(leaver.log, "worker_key = set")
            assert WORKER_KEY not in leaver.log.read_text()

    with launch(worker_key=WORKER_KEY) as server:
        family = family_of(server.pid)
        run(scenario(server.address))
    assert_all_end(family)


def test_a_worker_outlives_its_server_and_works_for_the_next_one(tmp_path: Path) -> None:
    service = at_free_port(**REMOTE)
    address = address_of(service)

    async def serve_all() -> list[tuple[int, ...]]:
        async with Client(address) as client:
            await client.wait_until_ready(60)
            return await results_of(client)

    async def open_call(process: psutil.Process) -> str:
        """What a call says that its server leaves unanswered."""
        async with Client(address) as client:
            running = asyncio.ensure_future(submit_and_wait(client, WANTS[0]))
            await is_working(client, 0)
            process.kill()
            with pytest.raises(ServerUnavailable) as raised:
                await running
            return str(raised.value)

    async def forgotten(request_id: str) -> str:
        async with Client(address) as client:
            return (await client.poll(request_id)).status

    with worker_process(address, tmp_path) as worker:
        wait_for(lambda: bool(lines_with(worker.log, "dials again")))
        with server_child(service, **REMOTE) as first:
            assert worker.wait_until_ready() == f"ready as worker 0 of {address}"
            wanted = run(serve_all())
            assert address in run(open_call(psutil.Process(first.pid)))
        with server_child(service, **REMOTE) as second:
            assert worker.wait_until_ready() == f"ready as worker 0 of {address}"
            assert run(serve_all()) == wanted
            assert run(forgotten("of the first server")) == "NOT_FOUND"
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0
        with server_child(service, **REMOTE) as third:
            assert worker.wait_until_ready() == f"ready as worker 0 of {address}"
            worker.process.send_signal(signal.SIGINT)
            assert worker.exit_code() == 130
            third.send_signal(signal.SIGINT)
            assert third.wait(60) == 130


def test_a_worker_that_stands_still_and_wakes_up_late_harms_nothing_and_works_again(tmp_path: Path) -> None:
    async def scenario(address: str, worker: WorkerProcess) -> None:
        async with Client(address) as client:
            wanted = await results_of(client)
            running = asyncio.ensure_future(results_of(client))
            await is_working(client, 1)
            stopped = psutil.Process(worker.pid)
            stopped.suspend()
            await has_states(client, "busy", "awaited")
            stopped.resume()
            assert await running == wanted
            assert await asyncio.to_thread(worker.wait_until_ready) == f"ready as worker 1 of {address}"
            assert await results_of(client) == wanted
            events = [e for e in await events_of(client) if isinstance(e, WorkerLost | WorkerUp)]
            assert [type(e) for e in events if e.worker_id == 1] == [WorkerUp, WorkerLost, WorkerUp]
            status = await client.status()
            assert status.num_requests_in_server == 0
            assert [worker.pages_used for worker in status.workers] == [0, 0]

    with launch(worker_key=WORKER_KEY, worker_timeout_s=3.0) as server, worker_process(server.address, tmp_path) as w:
        assert w.wait_until_ready() == f"ready as worker 1 of {server.address}"
        run(scenario(server.address, w))


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        (None, "another key", "wrong worker key"),
        (lambda model: (model / "config.json").unlink(), WORKER_KEY, "holds no config.json"),
        (lambda model: (model / "model.safetensors").write_bytes(b"others"), WORKER_KEY, "differ from the server's"),
    ],
    ids=["key", "config", "weights"],
)
def test_a_worker_that_cannot_work_here_ends_with_one_line(
    change: Callable[[Path], object] | None, key: str, reason: str, tmp_path: Path
) -> None:
    model = tmp_path / "copy"
    shutil.copytree(embedded_directory(), model)
    if change is not None:
        change(model)

    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu", worker_key=WORKER_KEY) as server:
            with worker_process(server.endpoint.local_address, tmp_path, "--model", str(model), key=key) as worker:
                assert await asyncio.to_thread(worker.exit_code) == 2
                assert worker.last_line().startswith("dbench: error: ")
                assert reason in worker.last_line()

    run(scenario())


def test_a_worker_without_a_server_gives_up_in_the_end(tmp_path: Path) -> None:
    address = address_of(at_free_port())
    with worker_process(address, tmp_path, "--reconnect-timeout-s", "0.5") as worker:
        assert worker.exit_code() == 1
        assert f"no server at {address} took the worker in within reconnect_timeout_s 0.5" in worker.last_line()


def test_ctrl_c_ends_a_worker_that_still_dials(tmp_path: Path) -> None:
    with worker_process(address_of(at_free_port()), tmp_path) as worker:
        wait_for(lambda: bool(lines_with(worker.log, "dials again")))
        worker.process.send_signal(signal.SIGINT)
        assert worker.exit_code() == 130
        assert not lines_with(worker.log, "Traceback")


def test_a_worker_that_is_stopped_while_it_loads_leaves_and_is_not_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu", worker_key=WORKER_KEY) as server, server.client() as client:
            with worker_process(server.endpoint.local_address, tmp_path) as worker:
                await server.has_states("starting", "starting")
                worker.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(worker.exit_code) == 0
            await server.has_states("starting", "ended")
            events = await events_of(client)
            assert [type(e) for e in events if isinstance(e, WorkerLeft | WorkerLost)] == [WorkerLeft]

    run(scenario())


def test_a_worker_whose_device_hangs_ends_itself() -> None:
    program = (
        "import sys, threading\n"
        "from dbench.serve import remote_worker\n"
        "from dbench.serve.fake_runner import FakeRunner, FakeScript, SystemClock\n"
        "hang = FakeScript(num_unmasked=lambda task, step: print('hangs', flush=True) or threading.Event().wait())\n"
        "fake = FakeRunner(hang, page_size=16, clock=SystemClock())\n"
        "remote_worker.load_runner = lambda deployment, *given, **named: (fake, deployment)\n"
        "config = remote_worker.RemoteWorkerConfig(sys.argv[1], sys.argv[2], 'cpu', None, 1, 30.0, 60.0)\n"
        "sys.exit(remote_worker.RemoteWorker(config, lambda worker_id: None, hang_timeout_s=0.2).run())\n"
    )

    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu", worker_key=WORKER_KEY) as server, server.client() as client:
            command = (sys.executable, "-c", program, server.endpoint.local_address, WORKER_KEY)
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                await server.has_states("starting", "idle")
                request_id = await client.submit(WANTS[0])
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "hangs\n"
                server.hub.worker_gone(1, "it hangs")
                _, said = await asyncio.to_thread(process.communicate)
            finally:
                process.kill()
                process.communicate()
            assert process.returncode == 1
            assert said == "the device has not answered for 0.2 s since the stream ended\n"
            server.add_worker(0)
            await server.has_states("idle", "awaited")
            assert (await final_state(client, request_id)).status == "COMPLETED"

    run(scenario())


def test_a_server_whose_workers_do_not_come_says_so(tmp_path: Path) -> None:
    service = at_free_port(**REMOTE, startup_timeout_s=0.5)
    with server_child(service, **REMOTE) as process:
        assert "workers 0 (colocated, awaited) were not ready within startup_timeout_s 0.5" in answer(process)["error"]
        assert process.wait(60) == 1
