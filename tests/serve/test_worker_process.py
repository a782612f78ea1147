"""Two real workers on the embedded model behind a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from dbench.events import BlockFinished, BlockRouted, WorkerLost
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.launch import ServerProcess
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import assert_all_end, family_of, launch
from tests.serve.server_builders import events_of, eventually, run

QUOTA = SamplingParameters("conf_quota", fixed_unmask_quota=2)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with launch(gpus="cpu,cpu", prefill_scheduler_policy="round_robin") as server:
        yield server


def test_a_request_gives_the_same_tokens_on_either_worker_alone_and_in_a_batch(server: ServerProcess) -> None:
    want = Submission(tuple(b"the same request"), 8, QUOTA, ignore_eos=True)
    others = [Submission(tuple(range(1, 20 + i)), 8, QUOTA, request_seed=i, ignore_eos=True) for i in range(6)]

    async def scenario() -> None:
        async with Client(server.address) as client:
            await client.reset_metrics()
            alone = [await submit_and_wait(client, want) for _ in range(2)]
            crowd = await asyncio.gather(*(submit_and_wait(client, one) for one in (*others, want)))
            first = {e.request_id: e.worker_id for e in await events_of(client) if isinstance(e, BlockRouted)}
            assert all(result.status == "COMPLETED" for result in (*alone, *crowd))
            assert {len(result.token_ids) for result in crowd} == {8}
            assert alone[0].token_ids == alone[1].token_ids == crowd[-1].token_ids
            assert set(first.values()) == {0, 1}

    run(scenario())


def test_all_pages_come_back_and_the_times_of_blocks_are_in_order(server: ServerProcess) -> None:
    async def scenario() -> None:
        async with Client(server.address) as client:
            await client.reset_metrics()
            wants = [Submission(tuple(range(1, 10 + i)), 8, QUOTA, ignore_eos=True) for i in range(8)]
            await asyncio.gather(*(submit_and_wait(client, want) for want in wants))

            async def pages_are_back() -> bool:
                return all(worker.pages_used == 0 for worker in (await client.status()).workers)

            await eventually(pages_are_back)
            blocks = [event for event in await events_of(client) if isinstance(event, BlockFinished)]
            assert len(blocks) == 16
            for block in blocks:
                assert block.end_s is not None
                moments = (block.received_s, block.refresh_start_s, block.refresh_end_s, block.decode_start_s)
                times = [moment for moment in moments if moment is not None]
                assert len(times) == 4
                assert times == sorted(times)
                assert block.ready_s <= block.routed_s <= block.end_s
                assert len(block.step_end_s) == len(block.step_num_unmasked) == 2

    run(scenario())


def test_the_blocks_of_a_killed_worker_finish_on_the_other() -> None:
    async def scenario(address: str) -> None:
        async with Client(address) as client:
            slow = SamplingParameters("conf_quota", fixed_unmask_quota=1)
            wants = [Submission(tuple(range(1, 30 + i)), 64, slow, ignore_eos=True) for i in range(6)]
            running = [asyncio.ensure_future(submit_and_wait(client, want)) for want in wants]

            async def both_are_busy() -> bool:
                return all(worker.queue_depth_active for worker in (await client.status()).workers)

            await eventually(both_are_busy)
            victim = (await client.status()).workers[0]
            psutil.Process(victim.pid).kill()
            results = await asyncio.gather(*running)
            assert [result.status for result in results] == ["COMPLETED"] * len(wants)
            assert {len(result.token_ids) for result in results} == {64}
            events = await events_of(client)
            assert [event.worker_id for event in events if isinstance(event, WorkerLost)] == [0]
            assert any(event.attempt == 1 for event in events if isinstance(event, BlockRouted))
            again = await submit_and_wait(client, wants[0])
            assert again.token_ids == results[0].token_ids

    with launch(gpus="cpu,cpu") as server:
        family = family_of(server.pid)
        run(scenario(server.address))
    assert_all_end(family)
