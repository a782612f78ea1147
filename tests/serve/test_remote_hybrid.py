"""Real `dbench worker` processes of both kinds: the KV between them, and how they leave (float32)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from dbench.errors import ServerUnavailable
from dbench.events import WorkerLeft, WorkerLost
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import answer, launch, server_child
from tests.serve.remote_builders import address_of, at_free_port, worker_process
from tests.serve.remote_hybrid import (
    DECODE_ID,
    PREFILL,
    PREFILL_ID,
    REMOTE_HYBRID,
    RemoteHybrid,
    remote_hybrid,
    served_by_remote_workers,
)
from tests.serve.server_builders import WORKER_KEY, events_of, eventually, run
from tests.serve.test_hybrid_served import HYBRID, served, transferred
from tests.serve.test_same_tokens import decode, different_jobs, engine
from tests.serve.test_same_tokens_served import NUM_JOBS

SLOW = SamplingParameters("conf_quota", fixed_unmask_quota=1)
WANTS = [Submission(tuple(range(1, 30 + i)), 48, SLOW, request_seed=i, ignore_eos=True) for i in range(8)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with engine(overlap=False) as one:
        return [tuple(decode(one, [job])[0]) for job in different_jobs(NUM_JOBS)]


async def results_of(client: Client) -> list[tuple[int, ...]]:
    results = await asyncio.gather(*(submit_and_wait(client, want) for want in WANTS))
    assert [result.status for result in results] == ["COMPLETED"] * len(WANTS)
    return [result.token_ids for result in results]


async def has_state(client: Client, worker_id: int, *states: str) -> None:
    async def is_there() -> bool:
        return (await client.status()).workers[worker_id].state in states

    await eventually(is_there)


async def kv_moves(client: Client) -> None:
    async def moves() -> bool:
        return len(transferred(await events_of(client))) > 4

    await eventually(moves)


@pytest.mark.parametrize("overflow", [True, False])
def test_a_hybrid_server_of_remote_workers_alone_gives_the_tokens_of_an_engine(
    alone: list[tuple[int, ...]], overflow: bool, tmp_path: Path
) -> None:
    token_ids, events = served_by_remote_workers(
        tmp_path, enable_hybrid_prefill_overflow=overflow, prefill_overload_threshold=400
    )
    assert token_ids == alone
    pairs = {(block.prefill_worker_id, block.worker_id) for block in transferred(events)}
    assert pairs == {(PREFILL_ID, DECODE_ID)}


def test_local_and_remote_workers_of_both_kinds_work_together(alone: list[tuple[int, ...]], tmp_path: Path) -> None:
    async def counts(address: str) -> list[tuple[str, int, int]]:
        async with Client(address) as client:
            return [(c.kind, c.expected, c.ready) for c in (await client.status()).worker_counts]

    local = {"prefill_gpus": "cpu", "hybrid_colocated_gpus": "cpu,cpu", "worker_key": WORKER_KEY}
    with (
        launch(None, **{**HYBRID, **local}) as server,
        worker_process(server.address, tmp_path, *PREFILL) as prefill,
    ):
        assert run(counts(server.address))[0] == ("prefill", 1, 1)
        assert prefill.wait_until_ready() == f"ready as worker 3 of {server.address}"
        with worker_process(server.address, tmp_path) as decoder:
            assert decoder.wait_until_ready() == f"ready as worker 4 of {server.address}"
            assert run(counts(server.address)) == [("prefill", 1, 2), ("colocated", 2, 3)]
            token_ids, events = run(served(server.address))
    assert token_ids == alone
    pairs = {(block.prefill_worker_id, block.worker_id) for block in transferred(events)}
    assert ({refresher for refresher, _ in pairs}, {decoder for _, decoder in pairs}) == ({0, 3}, {1, 2, 4})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_prefill_worker_that_leaves_ends_its_transfers_and_one_that_is_killed_is_lost(
    number: signal.Signals, tmp_path: Path
) -> None:
    leaves = number is not signal.SIGKILL

    async def scenario(hybrid: RemoteHybrid) -> None:
        async with Client(hybrid.address) as client:
            wanted = await results_of(client)
            running = asyncio.ensure_future(results_of(client))
            await kv_moves(client)
            await has_state(client, PREFILL_ID, "busy")
            hybrid.prefill.process.send_signal(number)
            code = await asyncio.to_thread(hybrid.prefill.exit_code)
            assert code == {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
            await has_state(client, PREFILL_ID, "awaited")
            assert not running.done()
            with worker_process(hybrid.address, tmp_path, *PREFILL) as next_one:
                assert await asyncio.to_thread(next_one.wait_until_ready) == f"ready as worker 0 of {hybrid.address}"
                assert await running == wanted
                events = await events_of(client)
            gone = [type(e) for e in events if isinstance(e, WorkerLeft | WorkerLost)]
            assert gone == [WorkerLeft if leaves else WorkerLost]

    with remote_hybrid(
        tmp_path, enable_hybrid_prefill_overflow=False, kv_max_pages=256, max_block_retries=0 if leaves else 2
    ) as hybrid:
        run(scenario(hybrid))


def test_a_leaving_prefill_worker_hands_back_blocks_that_nobody_takes_in_time(tmp_path: Path) -> None:
    async def scenario(hybrid: RemoteHybrid) -> None:
        async with Client(hybrid.address) as client:
            wanted = await results_of(client)
            stopped = psutil.Process(hybrid.decoder.pid)
            stopped.suspend()
            running = asyncio.ensure_future(results_of(client))

            async def keeps_pages() -> bool:
                worker = (await client.status()).workers[PREFILL_ID]
                return worker.pages_used > 0 and worker.state == "idle"

            await eventually(keeps_pages)
            hybrid.prefill.process.terminate()
            assert await asyncio.to_thread(hybrid.prefill.exit_code) == 0
            stopped.resume()
            with worker_process(hybrid.address, tmp_path, *PREFILL) as next_one:
                assert await asyncio.to_thread(next_one.wait_until_ready) == f"ready as worker 0 of {hybrid.address}"
                assert await running == wanted

    with remote_hybrid(
        tmp_path, "--drain-timeout-s", "1", enable_hybrid_prefill_overflow=False, max_block_retries=0
    ) as hybrid:
        run(scenario(hybrid))


def test_a_decoding_worker_ends_well_while_its_prefill_worker_stands_still(tmp_path: Path) -> None:
    async def scenario(hybrid: RemoteHybrid) -> None:
        async with Client(hybrid.address) as client:
            wanted = await results_of(client)
            stopped = psutil.Process(hybrid.prefill.pid)
            stopped.suspend()
            running = asyncio.ensure_future(results_of(client))
            await has_state(client, DECODE_ID, "idle")
            hybrid.decoder.process.terminate()
            assert await asyncio.to_thread(hybrid.decoder.exit_code) == 0
            stopped.resume()
            with worker_process(hybrid.address, tmp_path) as next_one:
                assert await asyncio.to_thread(next_one.wait_until_ready) == f"ready as worker 1 of {hybrid.address}"
                assert await running == wanted

    with remote_hybrid(tmp_path, "--drain-timeout-s", "1", enable_hybrid_prefill_overflow=False) as hybrid:
        run(scenario(hybrid))


def test_workers_of_both_kinds_outlive_their_server_and_work_for_the_next_one(tmp_path: Path) -> None:
    service = at_free_port(**REMOTE_HYBRID)
    address = address_of(service)

    async def first(server: subprocess.Popen[str]) -> list[tuple[int, ...]]:
        async with Client(address) as client:
            wanted = await results_of(client)
            await client.reset_metrics()
            running = asyncio.ensure_future(results_of(client))
            await kv_moves(client)
            server.kill()
            with pytest.raises(ServerUnavailable):
                await running
            return wanted

    async def second() -> tuple[list[tuple[int, ...]], int]:
        async with Client(address) as client:
            token_ids = await results_of(client)
            return token_ids, len(transferred(await events_of(client)))

    with worker_process(address, tmp_path, *PREFILL) as prefill, worker_process(address, tmp_path) as decoder:
        with server_child(service, **REMOTE_HYBRID) as server:
            assert answer(server) == {"address": address}
            wanted = run(first(server))
        with server_child(service, **REMOTE_HYBRID) as server:
            assert answer(server) == {"address": address}
            token_ids, num_transferred = run(second())
        assert token_ids == wanted
        assert num_transferred > 0
        for worker, number in ((prefill, PREFILL_ID), (decoder, DECODE_ID)):
            assert [worker.wait_until_ready() for _ in range(2)] == [f"ready as worker {number} of {address}"] * 2
