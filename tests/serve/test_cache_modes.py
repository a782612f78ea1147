"""The cache modes: what full recomputation costs and gives, beside the exact cache."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from dbench.errors import OptionError
from dbench.options import EngineOptions, options_of
from dbench.serve.engine import Engine
from dbench.serve.engine_state import EngineLimits
from dbench.serve.pages import PagePool
from dbench.serve.policy import SPANS
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import SamplingParameters
from tests.serve.checkpoints import EOS, VOCABULARY, tiny_tensors, write_checkpoint
from tests.serve.decoding import NUM_PAGES, PAGE_SIZE, Job, runner_for, task_of
from tests.serve.engine_builders import make_rig, make_task, quota
from tests.serve.reference import Reference

BLOCK_LENGTH = 8
RULES = (
    SamplingParameters("conf_threshold", confidence_threshold=0.3),
    SamplingParameters("conf_quota", fixed_unmask_quota=2),
    SamplingParameters("conf_threshold", temperature=0.7, confidence_threshold=0.2),
    SamplingParameters("random", temperature=1.0),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_tensors())


def different_jobs() -> list[Job]:
    draw = random.Random(5)
    return [
        Job(
            prompt=[draw.randrange(VOCABULARY) for _ in range(length)],
            gen_length=BLOCK_LENGTH * (1 + i % 3),
            sampling=RULES[i % len(RULES)],
            seed=draw.getrandbits(62),
        )
        for i, length in enumerate((1, 40, 7, 95, 16, 3, 64, 23))
    ]


def decode(directory: Path, cache_mode: str, *, overlap: bool) -> list[list[int]]:
    """All jobs at once through an engine."""
    limits = EngineLimits(
        max_batch_size=8,
        max_tokens_per_iteration=128,
        block_length=BLOCK_LENGTH,
        max_model_len=512,
        queue_policy="arrival_order",
        overlap=overlap,
        eos_token_ids=(EOS,),
        cache_mode=cache_mode,
    )
    runner, jobs = runner_for(directory, BLOCK_LENGTH), different_jobs()
    engine = Engine(runner, PagePool(NUM_PAGES, PAGE_SIZE), limits, worker_id=0)
    waiting = deque(jobs)
    while True:
        while waiting:
            job = waiting.popleft()
            engine.submit(task_of(job, BLOCK_LENGTH, request_id=str(job.seed)))
        report = engine.step()
        if report is None:
            break
        for end in report.ended:
            job = next(job for job in jobs if str(job.seed) == end.key.request_id)
            job.ids.extend(end.token_ids)
            waiting.extend([job] if len(job.ids) < job.gen_length else [])
    runner.close()
    return [job.ids for job in jobs]


def alone(reference: Reference) -> list[list[int]]:
    return [
        reference.decode(job.prompt, job.gen_length, BLOCK_LENGTH, job.sampling, job.seed).ids
        for job in different_jobs()
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_full_recomputation_equals_a_reference_without_a_cache(checkpoint: Path, overlap: bool) -> None:
    assert decode(checkpoint, "none", overlap=overlap) == alone(Reference(checkpoint, recomputes=True))


def test_the_cache_is_an_approximation_that_these_requests_show(checkpoint: Path) -> None:
    exact = decode(checkpoint, "exact", overlap=True)
    assert exact == alone(Reference(checkpoint))
    assert exact != alone(Reference(checkpoint, recomputes=True))


def test_a_step_without_a_cache_is_a_decode_step_over_the_whole_canvas() -> None:
    rig = make_rig(cache_mode="none")
    rig.run([make_task(prompt=8, masks=4, sampling=quota(2))])
    assert [launch for (launch,) in rig.runner.launches] == [
        Span(0, Phase.REFRESH, 0, 12),
        Span(0, Phase.DECODE, 0, 12),
    ]
    assert [(batch.batch_prompt_len, batch.batch_gen_len) for batch in rig.batches] == [(12, 0), (0, 12)]


def test_the_budget_counts_every_row_of_such_a_step() -> None:
    tasks = [make_task("a", prompt=36, masks=4), make_task("b", prompt=28, masks=4)]
    admitted_at = {}
    for cache_mode in SPANS:
        rig = make_rig(cache_mode=cache_mode, max_tokens_per_iteration=40)
        rig.run([replace(task) for task in tasks])
        admitted_at[cache_mode] = [batch.batch_prompt_len for batch in rig.batches].index(32)
    assert admitted_at == {"exact": 1, "none": 4}


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="unknown cache mode 'full'"):
        make_rig(cache_mode="full")


def test_the_option_offers_every_mode() -> None:
    option = next(option for option in options_of(EngineOptions) if option.name == "cache_mode")
    assert set(option.spec.choices) == SPANS.keys()
