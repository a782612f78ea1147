"""Proposals: which token each masked row would become, and how sure the model is of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dbench.serve.noise import DrawKeys, token_noise
from dbench.serve.unmask import NOISE_CHUNK_ROWS, NOISE_CHUNK_TOKENS, join, propose

MASK = 2


def keys_for(rows: int, seed: int = 5) -> DrawKeys:
    return DrawKeys(torch.full((rows,), seed), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))


def test_the_largest_logit_is_proposed_with_its_probability() -> None:
    found = propose(torch.tensor([[1.0, 3.0, 0.0, 2.0]]), MASK, None, keys_for(1))
    assert found.token_R.tolist() == [1]
    assert float(found.confidence_R) == pytest.approx(math.exp(3) / (math.exp(1) + math.exp(3) + math.exp(2)))


def test_equal_logits_go_to_the_lowest_token() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4000:] = 1.0
    logits[2, [70, 4999]] = 2.0
    assert propose(logits, MASK, None, keys_for(3)).token_R.tolist() == [0, 4000, 70]


def test_the_mask_id_has_no_share_in_anything() -> None:
    plain = torch.tensor([[1.0, 3.0, -torch.inf, 2.0]])
    loud = torch.tensor([[1.0, 3.0, 1e30, 2.0], [1.0, 3.0, torch.nan, 2.0]])
    wanted = propose(plain, MASK, None, keys_for(1))
    found = propose(loud, MASK, None, keys_for(2))
    assert found.token_R.tolist() == [1, 1]
    assert found.confidence_R.tolist() == wanted.confidence_R.tolist() * 2
    assert bool(found.is_finite_R.all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_told_apart(temperature: float) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[1.0, nan, 0, 0], [1.0, inf, 0, 0], [-inf, -inf, 7.0, -inf], [-inf, 1.0, 0, -inf]])
    found = propose(logits, MASK, torch.full((4,), temperature), keys_for(4))
    assert found.is_finite_R.tolist() == [False, False, False, True]
    assert int(found.token_R[3]) == 1


def test_short_number_formats_are_judged_in_float32() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 2.0]], dtype=torch.bfloat16)
    found = propose(logits, MASK, None, keys_for(1))
    assert found.confidence_R.dtype == torch.float32
    assert float(found.confidence_R) == pytest.approx(0.66524, abs=1e-5)


def test_noise_changes_the_token_but_not_the_measure_of_confidence() -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    found = propose(logits.clone(), MASK, torch.full((64,), 3.0), keys_for(64))
    logits[:, MASK] = -torch.inf
    assert found.token_R.tolist() != logits.argmax(dim=1).tolist()
    wanted = logits.softmax(dim=1).gather(1, found.token_R.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.confidence_R, wanted)


def test_pieces_of_rows_and_vocabulary_give_what_the_whole_gives() -> None:
    rows, vocabulary = NOISE_CHUNK_ROWS + 3, 2 * NOISE_CHUNK_TOKENS + 5
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2))
    temperature = torch.linspace(0.0, 2.0, rows)
    found = propose(logits.clone(), MASK, temperature, keys_for(rows))
    logits[:, MASK] = -torch.inf
    noisy = logits + temperature.unsqueeze(1) * token_noise(keys_for(rows), 0, vocabulary)
    assert found.token_R.tolist() == noisy.argmax(dim=1).tolist()
    assert int(found.token_R[0]) == int(logits[0].argmax())


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(3))
    temperature = torch.tensor([0.0, 1.0] * 4)
    together = propose(logits.clone(), MASK, temperature, keys_for(8))
    alone = [
        propose(logits[i : i + 1].clone(), MASK, temperature[i : i + 1], keys_for(8).rows(slice(i, i + 1)))
        for i in range(8)
    ]
    assert together.token_R.tolist() == join(alone).token_R.tolist()
    torch.testing.assert_close(together.confidence_R, join(alone).confidence_R)


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    rows = 4000
    logits = torch.tensor([0.0, 1.0, 9.0, 2.0]).repeat(rows, 1)
    tokens = propose(logits, MASK, torch.full((rows,), 2.0), keys_for(rows, seed=-1)).token_R
    shares = [float((tokens == token).float().mean()) for token in (0, 1, 3)]
    wanted = torch.tensor([0.0, 0.5, 1.0]).softmax(dim=0).tolist()
    assert shares == pytest.approx(wanted, abs=0.03)


class LargestTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every tensor that is made: the most elements of each number format."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements[out.dtype] = max(out.numel(), self.elements.get(out.dtype, 0))
        return out


def test_noise_never_exists_for_all_rows_and_tokens_at_once() -> None:
    rows, vocabulary = 4 * NOISE_CHUNK_ROWS, 2 * NOISE_CHUNK_TOKENS
    logits = torch.randn(rows, vocabulary)
    with LargestTensors() as seen:
        propose(logits, MASK, torch.ones(rows), keys_for(rows))
    assert torch.float64 not in seen.elements
    assert seen.elements[torch.int64] <= NOISE_CHUNK_ROWS * NOISE_CHUNK_TOKENS
    assert seen.elements[torch.float32] <= rows * vocabulary
