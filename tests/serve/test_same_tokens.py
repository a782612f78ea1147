"""A request's tokens do not depend on its company, the driver, the order of work, or a restart (float32)."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager

import pytest

from dbench.load.tasks import held_out
from dbench.models import embedded_directory
from dbench.serve.chat import Message
from dbench.serve.engine import Engine
from dbench.serve.families import read_model_config
from dbench.serve.sequence import SamplingParameters
from dbench.serve.tokenizer import load_tokenizer
from tests.serve.decoding import Job, decode_all, engine_on, limits_for, runner_for

BLOCK_LENGTH = 8
RULES = (
    SamplingParameters("conf_threshold", confidence_threshold=0.9),
    SamplingParameters("conf_threshold", temperature=0.7, confidence_threshold=0.2),
    SamplingParameters("conf_quota", fixed_unmask_quota=3),
    SamplingParameters("random", temperature=1.0),
)


def different_jobs(count: int) -> list[Job]:
    """Problems that the embedded model can answer: what it makes of noise would be ends of text alone."""
    draw = random.Random(11)
    tokenizer = load_tokenizer(embedded_directory())
    return [
        Job(
            prompt=tokenizer.encode_chat([Message("user", problem.prompt)]),
            gen_length=BLOCK_LENGTH * draw.randrange(1, 4),
            sampling=RULES[i % len(RULES)],
            seed=draw.getrandbits(62),
        )
        for i, problem in enumerate(held_out(3, count))
    ]


def engine(
    *, overlap: bool, max_tokens_per_iteration: int = 512, device: str = "cpu"
) -> AbstractContextManager[Engine]:
    config = read_model_config(embedded_directory())
    assert config.mask_token_id is not None
    runner = runner_for(embedded_directory(), BLOCK_LENGTH, mask_token_id=config.mask_token_id, device=device)
    limits = limits_for(embedded_directory(), BLOCK_LENGTH, overlap=overlap, max_tokens=max_tokens_per_iteration)
    return engine_on(runner, limits)


def decode(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """The ids of all jobs, run at once."""
    decode_all(engine, jobs, BLOCK_LENGTH)
    assert not any(job.error for job in jobs)
    return [job.ids for job in jobs]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with engine(overlap=False) as one:
        return [decode(one, [job])[0] for job in different_jobs(16)]


def test_every_request_is_answered_in_full_and_differently(alone: list[list[int]]) -> None:
    assert [len(ids) for ids in alone] == [job.gen_length for job in different_jobs(16)]
    assert len({tuple(ids) for ids in alone}) == 16


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens_per_iteration", [64, 512])
def test_a_batch_of_sixteen_changes_no_token(
    alone: list[list[int]], overlap: bool, max_tokens_per_iteration: int
) -> None:
    with engine(overlap=overlap, max_tokens_per_iteration=max_tokens_per_iteration) as fresh:
        assert decode(fresh, different_jobs(16)) == alone


def test_neither_overlap_nor_a_restart_changes_a_token_of_a_request_alone(alone: list[list[int]]) -> None:
    with engine(overlap=True) as fresh:
        assert [decode(fresh, [job])[0] for job in different_jobs(16)] == alone


def test_the_order_of_arrival_changes_no_token(alone: list[list[int]]) -> None:
    jobs = different_jobs(16)
    with engine(overlap=True) as fresh:
        decode(fresh, jobs[::-1])
    assert [job.ids for job in jobs] == alone
