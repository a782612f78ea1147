"""A request that no worker has the memory for, among others that fit, on real worker processes."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from dbench.events import BlockRouted, RequestFinished, WorkerLost
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import launch
from tests.serve.server_builders import events_of, run

SLOW = SamplingParameters("conf_quota", fixed_unmask_quota=1)
SMALL = [Submission(tuple(range(1, 20 + i)), 64, SLOW, request_seed=i, ignore_eos=True) for i in range(6)]
LARGE = Submission(tuple(3 + i % 200 for i in range(4000)), 32, SLOW, request_seed=6, ignore_eos=True)
SPARE_BYTES = 6 << 20
"""Half of what one activation of the large request takes; those of the small ones take a hundredth."""


def take_memory_from(pid: int) -> None:
    """From now on a process gets hardly any memory that it does not have already."""
    process = psutil.Process(pid)
    limit = process.memory_info().vms + SPARE_BYTES
    process.rlimit(psutil.RLIMIT_AS, (limit, limit))


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux lets one process limit another's memory")
def test_a_request_that_makes_its_batches_fail_ends_alone_and_costs_no_worker() -> None:
    async def scenario(address: str) -> None:
        async with Client(address) as client:
            wanted = [(await submit_and_wait(client, small)).token_ids for small in SMALL]
            for worker in (await client.status()).workers:
                take_memory_from(worker.pid)
            *results, poison = await asyncio.gather(*(submit_and_wait(client, want) for want in (*SMALL, LARGE)))
            assert [result.token_ids for result in results] == wanted
            assert poison.status == "ERROR"
            assert "block 0 failed 3 times, last on worker" in poison.error
            assert "batch failed: RuntimeError" in poison.error
            assert "memory" in poison.error
            events = await events_of(client)
            assert not [event for event in events if isinstance(event, WorkerLost)]
            assert max(e.attempt for e in events if isinstance(e, BlockRouted)) == 3
            assert sum(isinstance(event, RequestFinished) for event in events) == 2 * len(SMALL) + 1
            assert [(w.state, w.pages_used) for w in (await client.status()).workers] == [("idle", 0)] * 2

    with launch(gpus="cpu,cpu", max_model_len=4096, kv_max_pages=1024) as server:
        run(scenario(server.address))
