"""What prompts and models may not do to answers, through the engine: odd ids, a loved mask, numbers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbench.serve.families import FAMILIES
from tests.serve.checkpoints import (
    DREAM_NAMES,
    EOS,
    LLADA_NAMES,
    MASK,
    TINY,
    TINY_DREAM,
    VOCABULARY,
    prefer_mask,
    tiny_dream_tensors,
    tiny_tensors,
    write_checkpoint,
)
from tests.serve.decoding import Job, decode_all, engine_on, limits_for, runner_for
from tests.serve.reference import Caches, Reference
from tests.serve.test_engine_and_reference import SAMPLINGS, alone_with, prompt_of, together

BLOCK_LENGTH = 8
NAMES = {"llada": LLADA_NAMES, "dream": DREAM_NAMES}
CONFIGS = {"llada": TINY, "dream": TINY_DREAM}
PAD = 62


def tensors_of(family: str) -> dict[str, torch.Tensor]:
    return tiny_dream_tensors() if family == "dream" else tiny_tensors()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_mask_pad_and_end_ids_changes_only_what_the_model_makes_of_it(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tensors_of(family), config=CONFIGS[family], pad_token_id=PAD)
    prompts = ([MASK] * 20, [EOS], [PAD, MASK, EOS] * 9, [EOS] * 33, [5, MASK, MASK, EOS, MASK])
    jobs = [Job(prompt, 24, SAMPLINGS[i], seed=i, ignore_eos=False) for i, prompt in enumerate(prompts)]
    decoded = together(directory, jobs, BLOCK_LENGTH)
    assert decoded == alone_with(Reference(directory), jobs, BLOCK_LENGTH)
    for one in decoded:
        assert MASK not in one.ids
        assert len(one.ids) == 24 or one.ids[-1] == EOS
    assert any(len(one.ids) == 24 for one in decoded)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_always_prefers_the_mask_id_never_gets_it(family: str, tmp_path: Path) -> None:
    tensors = prefer_mask(tensors_of(family), NAMES[family])
    directory = write_checkpoint(tmp_path, tensors, config=CONFIGS[family])
    jobs = [Job(prompt_of(5 + 7 * i, i), 16, sampling, seed=i) for i, sampling in enumerate(SAMPLINGS)]
    reference = Reference(directory)
    for job in jobs:
        logits = reference.logits([*job.prompt, *[None] * 16], range(len(job.prompt) + 16), 0, Caches([], []))
        assert set(logits.argmax(dim=1).tolist()) == {MASK}
    decoded = together(directory, jobs, BLOCK_LENGTH)
    assert all(len(one.ids) == 16 and MASK not in one.ids for one in decoded)
    assert decoded == alone_with(reference, jobs, BLOCK_LENGTH)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_that_are_not_finite_end_their_own_request_only(family: str, overlap: bool, tmp_path: Path) -> None:
    poison = 13
    tensors = tensors_of(family)
    tensors[f"{NAMES[family]['embedding']}.weight"][poison] = torch.nan
    tensors[f"{NAMES[family]['lm_head']}.weight"][poison] = 0.0
    directory = write_checkpoint(tmp_path, tensors, config=CONFIGS[family])
    healthy = [[token for token in prompt_of(20 + i, i) if token != poison] for i in range(5)]
    prompts = [*healthy[:2], [1, poison, 2], *healthy[2:]]
    jobs = [Job(prompt, 16, SAMPLINGS[i + 2], seed=i) for i, prompt in enumerate(prompts)]
    limits = limits_for(directory, BLOCK_LENGTH, overlap=overlap)
    with engine_on(runner_for(directory, BLOCK_LENGTH), limits) as engine:
        decode_all(engine, jobs, BLOCK_LENGTH)
    broken = jobs.pop(2)
    assert broken.error == "block 0, step 0: logits are not finite at canvas position 3"
    assert broken.ids == []
    assert not any(job.error for job in jobs)
    assert [job.ids for job in jobs] == [one.ids for one in alone_with(Reference(directory), jobs, BLOCK_LENGTH)]
    assert all(0 <= token < VOCABULARY for job in jobs for token in job.ids)
