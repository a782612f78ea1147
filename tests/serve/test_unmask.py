"""Proposals: which token each masked row would become, and how sure the model is of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dbench.serve.noise import DrawKeys, token_noise
from dbench.serve.unmask import NOISE_CHUNK_ROWS, NOISE_CHUNK_TOKENS, Proposals, RowWishes, join, propose
from dbench.unmasking_rules import Measure

MASK = 2


def keys_for(rows: int, seed: int = 5) -> DrawKeys:
    return DrawKeys(torch.full((rows,), seed), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))


def propose_for(logits: Tensor, temperature: Tensor | None = None, *, seed: int = 5) -> Proposals:
    return propose(logits, MASK, RowWishes(keys_for(len(logits), seed), temperature, {}))


def score(measure: Measure, logits: list[list[float]]) -> list[float]:
    rows = torch.ones(len(logits), dtype=torch.bool)
    found = propose(torch.tensor(logits), MASK, RowWishes(keys_for(len(logits)), None, {measure: rows}))
    return found.score_R.tolist()


def test_the_largest_logit_is_proposed_with_its_probability() -> None:
    found = propose_for(torch.tensor([[1.0, 3.0, 0.0, 2.0]]))
    assert found.token_R.tolist() == [1]
    assert float(found.score_R) == pytest.approx(math.exp(3) / (math.exp(1) + math.exp(3) + math.exp(2)))


def test_equal_logits_go_to_the_lowest_token() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4000:] = 1.0
    logits[2, [70, 4999]] = 2.0
    assert propose_for(logits).token_R.tolist() == [0, 4000, 70]


def test_the_mask_id_has_no_share_in_anything() -> None:
    plain = torch.tensor([[1.0, 3.0, -torch.inf, 2.0]])
    loud = torch.tensor([[1.0, 3.0, 1e30, 2.0], [1.0, 3.0, torch.nan, 2.0]])
    wanted = propose_for(plain)
    found = propose_for(loud)
    assert found.token_R.tolist() == [1, 1]
    assert found.score_R.tolist() == wanted.score_R.tolist() * 2
    assert bool(found.is_finite_R.all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_told_apart(temperature: float) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[1.0, nan, 0, 0], [1.0, inf, 0, 0], [-inf, -inf, 7.0, -inf], [-inf, 1.0, 0, -inf]])
    found = propose_for(logits, torch.full((4,), temperature))
    assert found.is_finite_R.tolist() == [False, False, False, True]
    assert int(found.token_R[3]) == 1


def test_short_number_formats_are_judged_in_float32() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 2.0]], dtype=torch.bfloat16)
    found = propose_for(logits)
    assert found.score_R.dtype == torch.float32
    assert float(found.score_R) == pytest.approx(0.66524, abs=1e-5)


def test_noise_changes_the_token_but_not_the_measure_of_confidence() -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    found = propose_for(logits.clone(), torch.full((64,), 3.0))
    logits[:, MASK] = -torch.inf
    assert found.token_R.tolist() != logits.argmax(dim=1).tolist()
    wanted = logits.softmax(dim=1).gather(1, found.token_R.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.score_R, wanted)


def test_pieces_of_rows_and_vocabulary_give_what_the_whole_gives() -> None:
    rows, vocabulary = NOISE_CHUNK_ROWS + 3, 2 * NOISE_CHUNK_TOKENS + 5
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2))
    temperature = torch.linspace(0.0, 2.0, rows)
    found = propose_for(logits.clone(), temperature)
    logits[:, MASK] = -torch.inf
    noisy = logits + temperature.unsqueeze(1) * token_noise(keys_for(rows), 0, vocabulary)
    assert found.token_R.tolist() == noisy.argmax(dim=1).tolist()
    assert int(found.token_R[0]) == int(logits[0].argmax())


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(3))
    temperature = torch.tensor([0.0, 1.0] * 4)
    is_margin = torch.arange(8) % 3 == 0
    wishes = RowWishes(keys_for(8), temperature, {Measure.MARGIN: is_margin, Measure.ENTROPY: ~is_margin})
    together = propose(logits.clone(), MASK, wishes)
    alone = [propose(logits[i : i + 1].clone(), MASK, wishes.rows(slice(i, i + 1))) for i in range(8)]
    assert together.token_R.tolist() == join(alone).token_R.tolist()
    torch.testing.assert_close(together.score_R, join(alone).score_R)


def test_entropy_is_in_nats_and_leaves_the_mask_id_out() -> None:
    minus_inf = -math.inf
    found = score(
        Measure.ENTROPY,
        [[0.0, 0.0, 9.0, 0.0], [5.0, minus_inf, 9.0, minus_inf], [0.0, math.log(3), 9.0, minus_inf]],
    )
    mixed = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert found == pytest.approx([-math.log(3), 0.0, -mixed], abs=1e-6)


def test_margin_is_the_distance_of_the_two_largest_probabilities() -> None:
    found = score(Measure.MARGIN, [[0.0, math.log(3), 9.0, -math.inf], [1.0, 1.0, 9.0, 0.0], [0.0, 40.0, 9.0, -40.0]])
    assert found == pytest.approx([0.5, 0.0, 1.0], abs=1e-6)


def test_entropy_and_margin_are_those_of_the_noise_free_distribution() -> None:
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(4))
    every = torch.ones(16, dtype=torch.bool)
    for measure in (Measure.ENTROPY, Measure.MARGIN):
        cold, hot = (
            propose(logits.clone(), MASK, RowWishes(keys_for(16), temperature, {measure: every}))
            for temperature in (None, torch.full((16,), 5.0))
        )
        assert cold.token_R.tolist() != hot.token_R.tolist()
        torch.testing.assert_close(cold.score_R, hot.score_R)


def test_a_row_has_the_score_of_its_own_measure() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(5))
    by = {Measure.ENTROPY: torch.tensor([False, True, False]), Measure.MARGIN: torch.tensor([False, False, True])}
    found = propose(logits.clone(), MASK, RowWishes(keys_for(3), None, by)).score_R.tolist()
    wanted = [
        float(propose_for(logits.clone()).score_R[0]),
        score(Measure.ENTROPY, logits.tolist())[1],
        score(Measure.MARGIN, logits.tolist())[2],
    ]
    assert found == wanted


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    rows = 4000
    logits = torch.tensor([0.0, 1.0, 9.0, 2.0]).repeat(rows, 1)
    tokens = propose_for(logits, torch.full((rows,), 2.0), seed=-1).token_R
    shares = [float((tokens == token).float().mean()) for token in (0, 1, 3)]
    wanted = torch.tensor([0.0, 0.5, 1.0]).softmax(dim=0).tolist()
    assert shares == pytest.approx(wanted, abs=0.03)


class LargestTensors(TorchDispatchMode):
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
        propose_for(logits, torch.ones(rows))
    assert torch.float64 not in seen.elements
    assert seen.elements[torch.int64] <= NOISE_CHUNK_ROWS * NOISE_CHUNK_TOKENS
    assert seen.elements[torch.float32] <= rows * vocabulary
