"""The tokens of an engine in this process are those of servers: on either worker, and in new processes (float32)."""

from __future__ import annotations

import asyncio

import pytest

from dbench.events import BlockRouted
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.wire import Submission
from tests.serve.decoding import Job
from tests.serve.process_builders import launch
from tests.serve.server_builders import events_of, run
from tests.serve.test_same_tokens import BLOCK_LENGTH, decode, different_jobs, engine

NUM_JOBS = 16


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with engine(overlap=False) as one:
        return [tuple(decode(one, [job])[0]) for job in different_jobs(NUM_JOBS)]


def submission_of(job: Job) -> Submission:
    return Submission(tuple(job.prompt), job.gen_length, job.sampling, job.seed, ignore_eos=job.ignore_eos)


async def served(address: str) -> tuple[list[tuple[int, ...]], set[int]]:
    """The ids of all jobs, sent at once, and the workers that decoded a block of them."""
    async with Client(address) as client:
        sent = (submit_and_wait(client, submission_of(job)) for job in different_jobs(NUM_JOBS))
        results = await asyncio.gather(*sent)
        assert [result.status for result in results] == ["COMPLETED"] * NUM_JOBS
        routed = {event.worker_id for event in await events_of(client) if isinstance(event, BlockRouted)}
        return [result.token_ids for result in results], routed


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": "cpu,cpu", "prefill_scheduler_policy": "round_robin"},
        {"gpus": "cpu", "enable_overlap": False, "max_batch_size": 5, "max_tokens_per_iteration": 64},
    ],
    ids=["two workers", "another launch"],
)
def test_a_server_gives_the_tokens_of_an_engine_alone(alone: list[tuple[int, ...]], given: dict[str, object]) -> None:
    with launch(
        None, block_length=BLOCK_LENGTH, max_model_len=512, kv_max_pages=640, dtype="float32", **given
    ) as server:
        token_ids, workers = run(served(server.address))
    assert token_ids == alone
    assert workers == ({0, 1} if given["gpus"] == "cpu,cpu" else {0})
