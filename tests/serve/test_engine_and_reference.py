"""The engine over the torch runner gives, id for id, what a dense decoder gives for each sequence on its own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dbench.serve.attention import SdpaBackend
from dbench.serve.batch import SlotSizes, SlotTable, pack
from dbench.serve.families import FAMILIES, read_model_config
from dbench.serve.kv import KvPool
from dbench.serve.model import Model
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import SamplingParameters
from dbench.serve.weights import WeightSource, load_weights
from dbench.unmasking_rules import UNMASKING_RULES
from tests.serve.checkpoints import (
    EOS,
    MASK,
    TINY,
    TINY_DREAM,
    VOCABULARY,
    tiny_dream_tensors,
    tiny_tensors,
    write_checkpoint,
)
from tests.serve.decoding import PAGE_SIZE, Job, decode_all, engine_on, limits_for, runner_for, shuffled_pages, task_of
from tests.serve.reference import Caches, Decoded, Reference

ENDS = [EOS, 5, 17, 29, 40, 51]
"""End-of-text ids: enough of them for some answers to end early."""

SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters("conf_threshold", 0.7, confidence_threshold=0.4),
    SamplingParameters("conf_quota", fixed_unmask_quota=1),
    SamplingParameters("conf_quota", 1.3, fixed_unmask_quota=3),
    SamplingParameters("conf_dynamic", dynamic_unmask_factor=1.5),
    SamplingParameters("conf_dynamic", 0.5, dynamic_unmask_factor=1.0),
    SamplingParameters("random"),
    SamplingParameters("random", 0.4),
    SamplingParameters("entropy", entropy_threshold=1.0),
    SamplingParameters("entropy", 0.9, entropy_threshold=1.5),
    SamplingParameters("margin", margin_threshold=0.3),
    SamplingParameters("margin", 0.6, margin_threshold=0.1),
)
PROMPT_LENGTHS = (1, 200, 17, 8, 63, 64, 65, 5, 120, 31, 2, 90, 150, 44, 7, 16)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(length)]


def mixed_jobs(block_length: int) -> list[Job]:
    """Sixteen requests of all rules, at temperature 0 and above, with prompts of 1 to 200 tokens of any id."""
    return [
        Job(
            prompt_of(length, seed=i),
            gen_length=block_length * (1 + i % 3),
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            seed=(-1) ** i * i * 2**40 + i,
            ignore_eos=i % 4 != 3,
        )
        for i, length in enumerate(PROMPT_LENGTHS)
    ]


def write_family(directory: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    config = {"llada": TINY, "dream": TINY_DREAM}[family]
    tensors = {"llada": tiny_tensors, "dream": tiny_dream_tensors}[family](seed)
    return write_checkpoint(directory, tensors, config=config, **changes)


def alone_with(reference: Reference, jobs: list[Job], block_length: int) -> list[Decoded]:
    return [
        reference.decode(job.prompt, job.gen_length, block_length, job.sampling, job.seed, job.ignore_eos)
        for job in jobs
    ]


def together(
    directory: Path, jobs: list[Job], block_length: int, *, overlap: bool = True, cache_mode: str = "exact"
) -> list[Decoded]:
    """All jobs through one engine, on pages in no order."""
    limits = replace(limits_for(directory, block_length, overlap=overlap), cache_mode=cache_mode)
    with engine_on(runner_for(directory, block_length), limits, shuffled_pages(block_length)) as engine:
        decode_all(engine, jobs, block_length)
    assert not any(job.error for job in jobs)
    return [Decoded(job.ids, job.steps_per_block) for job in jobs]


class Case(NamedTuple):
    directory: Path
    block_length: int
    wanted: list[Decoded]


@pytest.fixture(scope="module", params=[(f, n) for f in FAMILIES for n in (4, 8, 32)], ids=lambda p: f"{p[0]}-{p[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, block_length = request.param
    directory = write_family(tmp_path_factory.mktemp(family), family, eos_token_id=ENDS)
    return Case(directory, block_length, alone_with(Reference(directory), mixed_jobs(block_length), block_length))


def test_every_rule_is_tried_at_temperature_0_and_above() -> None:
    tried = {(sampling.unmasking_strategy, sampling.temperature > 0) for sampling in SAMPLINGS}
    assert tried == {(rule, hot) for rule in UNMASKING_RULES for hot in (False, True)}


def test_the_requests_differ_in_answers_and_steps(case: Case) -> None:
    assert len({tuple(decoded.ids) for decoded in case.wanted}) > 13
    assert any(len(decoded.ids) % case.block_length for decoded in case.wanted)
    steps = {steps for decoded in case.wanted for steps in decoded.steps_per_block}
    assert len(steps) > 3


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_sixteen_mixed_requests_in_one_engine_equal_the_reference(case: Case, overlap: bool) -> None:
    jobs = mixed_jobs(case.block_length)
    assert together(case.directory, jobs, case.block_length, overlap=overlap) == case.wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_and_other_prompts_agree_too(family: str, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        directory = write_family(tmp_path / str(seed), family, seed=seed)
        jobs = [Job(prompt_of(3 + 29 * i, seed + i), 16, SAMPLINGS[(seed + i) % 12], seed=i) for i in range(6)]
        assert together(directory, jobs, 8) == alone_with(Reference(directory), jobs, 8)


# ---- full recomputation, and where the cache changes nothing --------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache_the_engine_equals_the_reference_that_recomputes(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, family, eos_token_id=ENDS)
    wanted = alone_with(Reference(directory, recomputes=True), mixed_jobs(8), 8)
    assert together(directory, mixed_jobs(8), 8, cache_mode="none") == wanted


def families_with(tmp_path: Path, **changes: Any) -> list[Path]:
    return [write_family(tmp_path / family, family, **changes) for family in FAMILIES]


def test_a_block_that_ends_at_its_refresh_needs_no_cache(tmp_path: Path) -> None:
    at_once = SamplingParameters("conf_quota", 0.5, fixed_unmask_quota=8)
    for directory in families_with(tmp_path):
        jobs = [Job(prompt_of(9 + i, i), 32, at_once, seed=i) for i in range(3)]
        decoded = together(directory, jobs, 8)
        assert decoded == alone_with(Reference(directory, recomputes=True), jobs, 8)
        assert [one.steps_per_block for one in decoded] == [[1, 1, 1, 1]] * 3


def test_with_one_layer_keeping_keys_changes_nothing(tmp_path: Path) -> None:
    """Keys and values of the first layer come from a position's own id alone."""
    for family in FAMILIES:
        tensors = {"llada": tiny_tensors, "dream": tiny_dream_tensors}[family](5)
        first = {name: tensor for name, tensor in tensors.items() if ".1." not in name and ".2." not in name}
        config = {"llada": {**TINY, "n_layers": 1}, "dream": {**TINY_DREAM, "num_hidden_layers": 1}}[family]
        directory = write_checkpoint(tmp_path / family, first, config=config)
        jobs = [Job(prompt_of(20 + i, i), 16, SAMPLINGS[i], seed=i) for i in range(12)]
        assert together(directory, jobs, 8) == alone_with(Reference(directory, recomputes=True), jobs, 8)


def test_with_more_layers_kept_keys_do_change_answers(tmp_path: Path) -> None:
    for directory in families_with(tmp_path):
        jobs = [Job(prompt_of(20 + i, i), 16, SAMPLINGS[2], seed=i) for i in range(4)]
        exact, recomputed = (alone_with(Reference(directory, recomputes=flag), jobs, 8) for flag in (False, True))
        assert exact != recomputed


# ---- bfloat16 -------------------------------------------------------------------------------------

BFLOAT16_TOLERANCE = 0.05
"""Root mean square of the logits' differences, as a share of their standard deviation."""


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_stay_near_those_of_float32(family: str, tmp_path: Path) -> None:
    """At a refresh and at a decode step with some positions fixed; both sides have weights rounded to bfloat16."""
    tensors = {"llada": tiny_tensors, "dream": tiny_dream_tensors}[family](0)
    config = {"llada": TINY, "dream": TINY_DREAM}[family]
    directory = write_checkpoint(tmp_path, {name: t.bfloat16() for name, t in tensors.items()}, config=config)
    model_config = read_model_config(directory)
    source = WeightSource(directory, "auto", torch.bfloat16, torch.device("cpu"), 0)
    model = Model(model_config, load_weights(model_config, source), SdpaBackend())
    table = SlotTable(SlotSizes(1, 128, 8, PAGE_SIZE, MASK, torch.device("cpu")))
    kv = KvPool(model_config, num_pages=16, page_size=PAGE_SIZE, like=torch.zeros(1, dtype=torch.bfloat16))
    shift = FAMILIES[family].logit_shift
    reference, caches = Reference(directory), Caches([], [])
    prompt = prompt_of(70, 1)
    canvas: list[int | None] = [*prompt, *[None] * 16]
    table.fill(0, task_of(Job(prompt, 16), 8), tuple(range(11)))
    spans = [Span(0, Phase.REFRESH, 0, 86), Span(0, Phase.DECODE, 70 - shift, 8 + shift, 70)]
    for span, fixed in zip(spans, ({71: 3, 72: 4, 76: 5}, {}), strict=True):
        batch = pack(table, [span], shift)
        found = model.logits(model.forward(batch, kv)).float()
        rows = range(span.start, span.start + span.num_rows)
        logits = reference.logits(canvas, rows, 0 if span.start == 0 else 70, caches)
        wanted = logits[[position - shift - span.start for position in batch.position_R.tolist()]]
        error = (found - wanted).square().mean().sqrt() / wanted.std()
        assert 0 < float(error) < BFLOAT16_TOLERANCE
        chosen = torch.tensor([[70 + i in fixed for i in range(8)]])
        token = torch.tensor([[fixed.get(70 + i, 0) for i in range(8)]])
        table.land(torch.tensor([0]), chosen, token, torch.tensor([EOS]))
        for position, value in fixed.items():
            canvas[position] = value
