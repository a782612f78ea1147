"""Hybrid mode on real processes: two workers that refresh, two that decode, and the KV between them (float32)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from dbench.events import BlockFinished, BlockRouted, Event, WorkerLost
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.launch import ServerProcess
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import assert_all_end, family_of, launch
from tests.serve.server_builders import events_of, eventually, run
from tests.serve.test_same_tokens import BLOCK_LENGTH, decode, different_jobs, engine
from tests.serve.test_same_tokens_served import NUM_JOBS, submission_of

PREFILL_IDS, DECODE_IDS = {0, 1}, {2, 3}
HYBRID: dict[str, object] = {
    "mode": "hybrid",
    "block_length": BLOCK_LENGTH,
    "max_model_len": 512,
    "kv_max_pages": 64,
    "dtype": "float32",
    "prefill_scheduler_policy": "round_robin",
    "decode_scheduler_policy": "round_robin",
}
"""With pages for a few canvases at a time, so that blocks wait for them."""


@contextmanager
def hybrid_server(**given: object) -> Iterator[ServerProcess]:
    local = {"prefill_gpus": "cpu,cpu", "hybrid_colocated_gpus": "cpu,cpu"}
    with launch(None, **{**HYBRID, **local, **given}) as server:
        family = family_of(server.pid)
        yield server
    assert_all_end(family)


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with engine(overlap=False) as one:
        return [tuple(decode(one, [job])[0]) for job in different_jobs(NUM_JOBS)]


async def served(address: str) -> tuple[list[tuple[int, ...]], list[Event]]:
    """The ids of all jobs, sent at once, and what happened; every page is free again afterwards."""
    async with Client(address) as client:
        sent = (submit_and_wait(client, submission_of(job)) for job in different_jobs(NUM_JOBS))
        results = await asyncio.gather(*sent)
        assert [result.status for result in results] == ["COMPLETED"] * NUM_JOBS

        async def pages_are_back() -> bool:
            return all(worker.pages_used == 0 for worker in (await client.status()).workers)

        await eventually(pages_are_back)
        return [result.token_ids for result in results], await events_of(client)


def transferred(events: list[Event]) -> list[BlockFinished]:
    return [e for e in events if isinstance(e, BlockFinished) and e.prefill_worker_id is not None]


@pytest.mark.parametrize(
    "given",
    [
        {"prefill_overload_threshold": 200},
        {"prefill_overload_threshold": 200, "enable_hybrid_prefill_overflow": False},
        {"enable_overlap": False, "max_batch_size": 3, "max_prefill_tokens_per_batch": 64},
    ],
    ids=["overflow", "no overflow", "small batches"],
)
def test_hybrid_gives_the_tokens_of_an_engine_alone(alone: list[tuple[int, ...]], given: dict[str, object]) -> None:
    with hybrid_server(**given) as server:
        token_ids, events = run(served(server.address))
    assert token_ids == alone
    pairs = {(block.prefill_worker_id, block.worker_id) for block in transferred(events)}
    assert {refresher for refresher, _ in pairs} == PREFILL_IDS
    assert {decoder for _, decoder in pairs} == DECODE_IDS
    overflowed = {e.worker_id for e in events if isinstance(e, BlockRouted)} & DECODE_IDS
    assert bool(overflowed) == (given.get("prefill_overload_threshold") is not None and len(given) == 1)


def test_everybody_listens_on_loopback_alone_and_times_are_in_order_across_workers() -> None:
    with hybrid_server() as server:
        _, events = run(served(server.address))
        connections = [c for process in family_of(server.pid) for c in process.net_connections(kind="tcp")]
        assert {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == "LISTEN"} <= {"127.0.0.1", "::1"}
    blocks = transferred(events)
    assert blocks
    for block in blocks:
        assert block.end_s is not None
        assert block.kv_transfer_end_s is not None
        one_clock = (block.received_s, block.refresh_start_s, block.refresh_end_s)
        refresh = [moment for moment in one_clock if moment is not None]
        assert len(refresh) == 3
        assert refresh == sorted(refresh)
        assert block.kv_transfer_start_s is not None
        assert block.kv_transfer_start_s >= refresh[1]
        assert block.decode_start_s is not None
        assert block.kv_transfer_end_s <= block.decode_start_s <= block.end_s
        assert len(block.step_end_s) >= 2


@pytest.mark.parametrize("victim", [0, 2], ids=["a sender", "a receiver"])
def test_the_blocks_of_a_killed_worker_finish_elsewhere_with_their_tokens(victim: int) -> None:
    slow = SamplingParameters("conf_quota", fixed_unmask_quota=1)
    wants = [Submission(tuple(range(1, 30 + i)), 48, slow, ignore_eos=True) for i in range(8)]

    async def scenario(address: str) -> None:
        async with Client(address) as client:
            running = [asyncio.ensure_future(submit_and_wait(client, want)) for want in wants]

            async def kv_moves() -> bool:
                return len(transferred(await events_of(client))) > 4

            await eventually(kv_moves)
            psutil.Process((await client.status()).workers[victim].pid).kill()
            results = await asyncio.gather(*running)
            assert [result.status for result in results] == ["COMPLETED"] * len(wants)
            events = await events_of(client)
            assert [event.worker_id for event in events if isinstance(event, WorkerLost)] == [victim]

            async def everybody_is_back_and_empty() -> bool:
                return all(worker.ready and worker.pages_used == 0 for worker in (await client.status()).workers)

            await eventually(everybody_is_back_and_empty)
            again = await asyncio.gather(*(submit_and_wait(client, want) for want in wants))
            assert [result.token_ids for result in again] == [result.token_ids for result in results]
            returned = {e.worker_id for e in (await events_of(client))[len(events) :] if isinstance(e, BlockFinished)}
            assert returned >= DECODE_IDS

    with hybrid_server(kv_max_pages=256) as server:
        run(scenario(server.address))
