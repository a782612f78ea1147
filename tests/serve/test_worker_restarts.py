"""Worker processes that are killed or stopped under load: requests wait for the next one and lose nothing."""

from __future__ import annotations

import asyncio

import psutil

from dbench.events import BlockRouted, WorkerLost, WorkerUp
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import assert_all_end, family_of, launch
from tests.serve.server_builders import events_of, eventually, run

SLOW = SamplingParameters("conf_quota", fixed_unmask_quota=1)
WANTS = [Submission(tuple(range(1, 30 + i)), 64, SLOW, request_seed=i, ignore_eos=True) for i in range(6)]


async def results_of(client: Client) -> list[tuple[int, ...]]:
    results = await asyncio.gather(*(submit_and_wait(client, want) for want in WANTS))
    assert [result.status for result in results] == ["COMPLETED"] * len(WANTS)
    return [result.token_ids for result in results]


async def pid_of_a_busy_worker(client: Client, worker_id: int = 0) -> int:
    async def is_busy() -> bool:
        return (await client.status()).workers[worker_id].queue_depth_active > 0

    await eventually(is_busy)
    return (await client.status()).workers[worker_id].pid


def test_the_only_worker_is_killed_and_all_requests_complete_with_the_same_tokens() -> None:
    async def scenario(address: str) -> None:
        async with Client(address) as client:
            wanted = await results_of(client)
            await client.reset_metrics()
            running = asyncio.ensure_future(results_of(client))
            pid = await pid_of_a_busy_worker(client)
            psutil.Process(pid).kill()

            async def is_starting() -> bool:
                return (await client.status()).workers[0].state == "starting"

            await eventually(is_starting)
            late = await client.submit(WANTS[0])
            assert (await client.poll(late)).status == "PENDING"
            assert not (await client.status()).ready_for_requests
            assert await running == wanted
            worker = (await client.status()).workers[0]
            assert worker.ready
            assert worker.pid != pid
            events = await events_of(client)
            assert [type(e) for e in events if isinstance(e, WorkerLost | WorkerUp)] == [WorkerUp, WorkerLost, WorkerUp]
            assert {e.attempt for e in events if isinstance(e, BlockRouted)} == {0, 1}

    with launch() as server:
        family = family_of(server.pid)
        run(scenario(server.address))
        family += family_of(server.pid)
    assert_all_end(family)


def test_a_worker_that_stands_still_is_killed_and_started_again() -> None:
    async def scenario(address: str) -> None:
        async with Client(address) as client:
            wanted = await results_of(client)
            running = asyncio.ensure_future(results_of(client))
            pid = await pid_of_a_busy_worker(client)
            stopped = psutil.Process(pid)
            stopped.suspend()
            assert await running == wanted
            assert_all_end([stopped])

            async def is_back() -> bool:
                worker = (await client.status()).workers[0]
                return worker.ready and worker.pid != pid

            await eventually(is_back)
            reasons = [e.reason for e in await events_of(client) if isinstance(e, WorkerLost)]
            assert len(reasons) == 1
            assert reasons[0].startswith("nothing was heard of it for")

    with launch(gpus="cpu,cpu", worker_timeout_s=3.0) as server:
        family = family_of(server.pid)
        run(scenario(server.address))
        family += family_of(server.pid)
    assert_all_end(family)


def test_a_server_that_ends_while_a_worker_is_started_again_leaves_nothing() -> None:
    async def scenario(address: str) -> None:
        async with Client(address) as client:
            running = [await client.submit(want) for want in WANTS[:2]]
            psutil.Process(await pid_of_a_busy_worker(client)).kill()

            async def is_starting() -> bool:
                return (await client.status()).workers[0].state == "starting"

            await eventually(is_starting)
            assert (await client.poll(running[0])).status in ("PENDING", "WAITING_NEXT_BLOCK")

    with launch(drain_timeout_s=0.0) as server:
        family = family_of(server.pid)
        run(scenario(server.address))
        family += family_of(server.pid)
    assert_all_end(family)
