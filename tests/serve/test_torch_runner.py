"""The runner gives, id for id, what a dense decoder gives for each sequence on its own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dbench.errors import ModelError, OptionError
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import SamplingParameters
from dbench.serve.torch_runner import RunnerConfig, build_runner
from dbench.serve.warm_up import warm_up
from tests.serve.checkpoints import EOS, MASK, VOCABULARY, tiny_tensors, write_checkpoint
from tests.serve.decoding import NUM_PAGES, PAGE_SIZE, Job, run_jobs, runner_for, task_of
from tests.serve.reference import Reference

SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters("conf_threshold", confidence_threshold=0.3),
    SamplingParameters("conf_threshold", temperature=0.7, confidence_threshold=0.5),
    SamplingParameters("conf_quota", fixed_unmask_quota=1),
    SamplingParameters("conf_quota", temperature=1.3, fixed_unmask_quota=3),
    SamplingParameters("random"),
    SamplingParameters("random", temperature=0.4),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_tensors())


def prompt_of(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(length)]


def assert_same_as_alone(reference: Reference, jobs: list[Job], block_length: int) -> None:
    for job in jobs:
        alone = reference.decode(job.prompt, job.gen_length, block_length, job.sampling, job.seed, job.ignore_eos)
        assert (job.ids, job.steps_per_block) == (alone.ids, alone.steps_per_block)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.unmasking_strategy}-{s.temperature}")
@pytest.mark.parametrize("prompt_length", [1, 37])
def test_one_sequence_equals_the_reference(checkpoint: Path, sampling: SamplingParameters, prompt_length: int) -> None:
    runner = runner_for(checkpoint, 8)
    jobs = run_jobs(runner, [Job(prompt_of(prompt_length, 1), 24, sampling, seed=-5)], 8)
    runner.close()
    assert_same_as_alone(Reference(checkpoint), jobs, 8)


@pytest.mark.parametrize("block_length", [4, 8, 32])
def test_sixteen_mixed_sequences_equal_the_reference_each_on_its_own(checkpoint: Path, block_length: int) -> None:
    lengths = (1, 200, 17, 8, 63, 64, 65, 5, 120, 31, 2, 90, 150, 44, 7, 16)
    jobs = [
        Job(
            prompt_of(length, seed=i),
            gen_length=block_length * (1 + i % 3),
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            seed=(-1) ** i * i * 2**40 + i,
            start=i % 6,
        )
        for i, length in enumerate(lengths)
    ]
    runner = runner_for(checkpoint, block_length)
    run_jobs(runner, jobs, block_length)
    runner.close()
    assert_same_as_alone(Reference(checkpoint), jobs, block_length)


def test_query_heads_that_share_keys_equal_the_reference(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors(3, n_kv_heads=2), n_kv_heads=2)
    runner = runner_for(directory, 8)
    jobs = run_jobs(runner, [Job(prompt_of(20 + i, i), 16, SAMPLINGS[4], seed=i) for i in range(3)], 8)
    runner.close()
    assert_same_as_alone(Reference(directory), jobs, 8)


def test_end_of_text_ends_a_block_like_the_reference(tmp_path: Path) -> None:
    eos = [EOS, *range(0, 50, 7)]
    directory = write_checkpoint(tmp_path, tiny_tensors(), eos_token_id=eos)
    jobs = [
        Job(prompt_of(9 + i, i), 32, SAMPLINGS[i % len(SAMPLINGS)], seed=i, ignore_eos=i % 4 == 3) for i in range(12)
    ]
    runner = runner_for(directory, 8)
    run_jobs(runner, jobs, 8, eos)
    runner.close()
    assert any(len(job.ids) % 8 for job in jobs)
    assert any(job.steps_per_block[-1] < len(job.ids) for job in jobs)
    assert_same_as_alone(Reference(directory), jobs, 8)


def test_a_prompt_of_mask_and_end_ids_is_left_as_it_is(checkpoint: Path) -> None:
    prompt = [MASK, EOS, MASK, 3, MASK, EOS]
    jobs = [Job(prompt, 16, SAMPLINGS[i], ignore_eos=False) for i in (0, 3)]
    runner = runner_for(checkpoint, 8)
    run_jobs(runner, jobs, 8)
    runner.close()
    for job in jobs:
        assert MASK not in job.ids
        assert min(job.fixed) >= len(prompt)
    assert_same_as_alone(Reference(checkpoint), jobs, 8)


def test_the_mask_id_never_comes_out_even_when_its_logit_is_the_largest(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.transformer.ff_out.weight"][MASK] *= 50
    directory = write_checkpoint(tmp_path, tensors)
    jobs = [Job(prompt_of(12, i), 16, sampling, seed=i) for i, sampling in enumerate(SAMPLINGS)]
    runner = runner_for(directory, 8)
    run_jobs(runner, jobs, 8)
    runner.close()
    assert all(MASK not in job.ids for job in jobs)
    assert_same_as_alone(Reference(directory), jobs, 8)


def test_logits_that_are_not_finite_end_their_own_sequence_only(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.transformer.wte.weight"][13] = torch.nan
    directory = write_checkpoint(tmp_path, tensors)
    healthy = [[token for token in prompt_of(20, i) if token != 13] for i in range(3)]
    jobs = [Job(prompt, 8, SAMPLINGS[1]) for prompt in (healthy[0], [1, 13, 2], healthy[1], healthy[2])]
    runner = runner_for(directory, 8)
    run_jobs(runner, jobs, 8)
    broken = jobs.pop(1)
    assert broken.error == "logits are not finite at canvas position 3"
    assert (broken.ids, broken.fixed, broken.steps_per_block) == ([], {}, [1])
    assert not any(job.error for job in jobs)
    again = run_jobs(runner, [Job(healthy[0], 8, SAMPLINGS[1])], 8)
    runner.close()
    assert again[0].ids == jobs[0].ids
    assert_same_as_alone(Reference(directory), [job for job in jobs if 13 not in job.ids], 8)


def test_a_span_launched_after_the_end_of_its_block_is_void_and_counts_no_step(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, 8)
    job = Job([1, 2, 3], 8, SamplingParameters("conf_quota", fixed_unmask_quota=8))
    other = Job([4, 5], 8, SamplingParameters("conf_quota", temperature=1.0, fixed_unmask_quota=4), seed=9)
    runner.attach(0, task_of(job, 8), (0, 1))
    runner.attach(1, task_of(other, 8), (2, 3))
    refresh, decode = Span(0, Phase.REFRESH, 0, 11), Span(0, Phase.DECODE, 3, 8)
    tickets = [
        runner.launch((refresh, Span(1, Phase.REFRESH, 0, 10))),
        runner.launch((decode, Span(1, Phase.DECODE, 2, 8))),
        runner.launch((Span(1, Phase.DECODE, 2, 8), decode)),
    ]
    results = [runner.collect(ticket) for ticket in tickets]
    runner.close()
    assert [[span.slot for span in result.spans] for result in results] == [[0, 1], [0, 1], [1, 0]]
    assert (results[0].spans[0].done, results[0].spans[0].void) == (True, False)
    void = [results[1].spans[0], *results[2].spans]
    assert all(span.void and span.done and not span.positions for span in void)
    alone = Reference(checkpoint).decode(other.prompt, 8, 8, other.sampling, 9)
    found = {p: t for r in results[:2] for p, t in zip(r.spans[1].positions, r.spans[1].token_ids, strict=True)}
    assert [found[position] for position in range(2, 10)] == alone.ids


def test_positions_come_in_ascending_order_and_times_in_order(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, 8)
    runner.attach(2, task_of(Job([1], 8, SAMPLINGS[4]), 8), (5, 4))
    result = runner.collect(runner.launch((Span(2, Phase.REFRESH, 0, 9),)))
    runner.close()
    (span,) = result.spans
    assert span.positions == tuple(sorted(span.positions))
    assert len(span.positions) == len(span.token_ids) == 3
    assert 0 < result.sampling_s < result.completed_s - result.launched_s


def test_a_slot_is_used_again_after_detach(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, 8, num_slots=1)
    first = run_jobs(runner, [Job(prompt_of(150, 1), 16, SAMPLINGS[2], seed=1)], 8)
    second = run_jobs(runner, [Job(prompt_of(5, 2), 8, SAMPLINGS[5], seed=2)], 8)
    runner.close()
    assert_same_as_alone(Reference(checkpoint), first + second, 8)


def test_a_failure_of_the_batch_is_raised_by_collect(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, 8)
    runner.attach(0, task_of(Job([1] * 30, 8), 8), (0,))
    ticket = runner.launch((Span(0, Phase.REFRESH, 0, 38),))
    with pytest.raises(AssertionError, match="canvas beyond its pages"):
        runner.collect(ticket)
    runner.detach(0)
    jobs = run_jobs(runner, [Job([1, 2], 8)], 8)
    runner.close()
    assert len(jobs[0].ids) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_number_formats_decode_every_position(checkpoint: Path, dtype: str) -> None:
    runner = runner_for(checkpoint, 8, dtype=dtype)
    jobs = run_jobs(runner, [Job(prompt_of(30, i), 16, sampling) for i, sampling in enumerate(SAMPLINGS)], 8)
    runner.close()
    assert all(len(job.ids) == 16 and not job.error for job in jobs)


def test_warm_up_leaves_the_runner_as_new(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, 8)
    warm_up(runner, block_length=8, page_size=PAGE_SIZE, logit_shift=0)
    jobs = run_jobs(runner, [Job(prompt_of(30, 1), 16, SAMPLINGS[2])], 8)
    runner.close()
    assert_same_as_alone(Reference(checkpoint), jobs, 8)


def config_of(checkpoint: Path) -> RunnerConfig:
    return RunnerConfig(checkpoint, "auto", "float32", "cpu", 0, NUM_PAGES, PAGE_SIZE, 1, 8, MASK, 1)


def test_an_unknown_dtype_lists_the_known_ones(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="unknown dtype 'int8'"):
        build_runner(replace(config_of(checkpoint), dtype="int8"))


def test_a_mask_id_outside_the_vocabulary_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="mask id 64 is outside the vocabulary of 64"):
        build_runner(replace(config_of(checkpoint), mask_token_id=64))


def test_pages_that_hold_no_block_are_refused(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match="block of 8 and one token of prompt do not fit into 8 tokens"):
        build_runner(replace(config_of(checkpoint), num_pages=1))
