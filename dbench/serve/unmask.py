"""Choosing tokens and positions: proposals from logits, and the rules that fix some of them.

Shapes: R masked rows, V vocabulary, B sequences, L block length. The mask id is removed before everything else;
equal logits go to the lowest token id, equal scores to the lowest position (torch.argmax promises neither).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbench.serve.noise import WORDS_PER_DRAW, DrawKeys, Tag, token_noise, word
from dbench.unmasking_rules import Measure

NOISE_CHUNK_ROWS = 32
NOISE_CHUNK_TOKENS = 8192
"""Noise is made and used in pieces of at most this size: about 20 MB while they are made, whatever R and V are."""


@dataclass(frozen=True, slots=True)
class RowWishes:
    """What the requests of the masked rows ask for."""

    keys: DrawKeys
    temperature_R: Tensor | None
    """None: all rows are greedy."""
    measured_by: Mapping[Measure, Tensor]
    """Measure -> bool [R], the rows that are ordered by it; rows of none are ordered by confidence."""

    def rows(self, index: slice) -> RowWishes:
        return RowWishes(
            self.keys.rows(index),
            None if self.temperature_R is None else self.temperature_R[index],
            {measure: is_R[index] for measure, is_R in self.measured_by.items()},
        )


@dataclass(frozen=True, slots=True)
class Proposals:
    """What each masked row would become."""

    token_R: Tensor
    score_R: Tensor
    """float32: the larger, the surer, by the row's measure."""
    is_finite_R: Tensor
    """False: a NaN, plus infinity, or nothing but minus infinity; token and score then mean nothing."""


def propose(logits_RV: Tensor, mask_token_id: int, wishes: RowWishes) -> Proposals:
    """A token per row: the argmax, or with a temperature above 0 argmax(logits + temperature x Gumbel noise).

    Scores come from the softmax of the noise-free logits at temperature 1. Overwrites the mask id's column of
    `logits_RV`.
    """
    logits_RV[:, mask_token_id] = -torch.inf
    logits_RV = logits_RV.float()
    largest_R1 = logits_RV.amax(dim=1, keepdim=True)
    token_R = _first_equal(logits_RV, largest_R1)
    temperature_R = wishes.temperature_R
    if temperature_R is not None:
        hot_R = temperature_R.nonzero().squeeze(1)
        token_R[hot_R] = _noisy_argmax(logits_RV[hot_R], temperature_R[hot_R], wishes.keys.rows(hot_R))
    weights_RV = (logits_RV - largest_R1).exp_()
    total_R = weights_RV.sum(dim=1)
    score_R = weights_RV.gather(1, token_R.unsqueeze(1)).squeeze(1) / total_R
    for measure, is_R in wishes.measured_by.items():
        score_R = torch.where(is_R, MEASURES[measure](weights_RV, total_R), score_R)
    return Proposals(token_R, score_R, largest_R1.squeeze(1).isfinite())


def minus_entropy(weights_RV: Tensor, total_R: Tensor) -> Tensor:
    """Minus the entropy, in nats, of the distributions with these weights."""
    parts_RV: Tensor = torch.special.entr(weights_RV / total_R.unsqueeze(1))
    return -parts_RV.sum(dim=1)


def margin(weights_RV: Tensor, total_R: Tensor) -> Tensor:
    """The largest probability minus the second largest; equal ones give 0."""
    first_R, second_R = weights_RV.topk(2, dim=1).values.unbind(dim=1)
    return (first_R - second_R) / total_R


MEASURES: dict[Measure, Callable[[Tensor, Tensor], Tensor]] = {Measure.ENTROPY: minus_entropy, Measure.MARGIN: margin}
"""Scores that cost extra -> float32 [R], from exp(logit - largest logit) and its sum; the larger, the surer."""


def join(parts: Sequence[Proposals]) -> Proposals:
    """Proposals of rows that were computed in pieces."""
    if len(parts) == 1:
        return parts[0]
    return Proposals(
        torch.cat([part.token_R for part in parts]),
        torch.cat([part.score_R for part in parts]),
        torch.cat([part.is_finite_R for part in parts]),
    )


def _first_equal(values_RX: Tensor, wanted_R1: Tensor) -> Tensor:
    """Lowest index in each row whose value equals the wanted one; the last index if none does (NaN)."""
    last = values_RX.shape[1] - 1
    index_X = torch.arange(last + 1, dtype=torch.int32, device=values_RX.device)
    return torch.where(values_RX == wanted_R1, index_X, last).amin(dim=1).long()


def _noisy_argmax(logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys) -> Tensor:
    """argmax(logits + temperature x noise) of every row, over pieces of rows and vocabulary."""
    num_rows, vocabulary = logits_RV.shape
    best_R1 = torch.full((num_rows, 1), -torch.inf, device=logits_RV.device)
    token_R = torch.zeros(num_rows, dtype=torch.int64, device=logits_RV.device)
    assert NOISE_CHUNK_TOKENS % WORDS_PER_DRAW == 0
    for row in range(0, num_rows, NOISE_CHUNK_ROWS):
        rows = slice(row, row + NOISE_CHUNK_ROWS)
        for first in range(0, vocabulary, NOISE_CHUNK_TOKENS):
            piece = logits_RV[rows, first : first + NOISE_CHUNK_TOKENS]
            noise = token_noise(keys.rows(rows), first, piece.shape[1])
            noisy = noise.mul_(temperature_R[rows].unsqueeze(1)).add_(piece)
            largest = noisy.amax(dim=1, keepdim=True)
            is_better = (largest > best_R1[rows]).squeeze(1)  # equal values stay with the lower token id
            token_R[rows] = torch.where(is_better, _first_equal(noisy, largest) + first, token_R[rows])
            best_R1[rows] = torch.maximum(largest, best_R1[rows])
    return token_R


@dataclass(frozen=True, slots=True)
class Candidates:
    """The masked rows of the blocks of a batch, and what the rules may look at."""

    masked_BL: Tensor
    score_BL: Tensor
    """float32, by the measure of the block's rule: the larger, the surer; minus infinity where not masked."""
    parameter_B: Tensor
    """float32: the value of the rule's own parameter; 0 for a rule without one."""
    seed_B: Tensor
    block_start_B: Tensor
    step_B: Tensor

    def only(self, index: Tensor) -> Candidates:
        return Candidates(
            self.masked_BL[index],
            self.score_BL[index],
            self.parameter_B[index],
            self.seed_B[index],
            self.block_start_B[index],
            self.step_B[index],
        )


Rule = Callable[[Candidates], Tensor]
"""Candidates -> bool [B, L]: the rows to fix, masked ones only, at least one in every block that has any."""


def at_least_parameter(rows: Candidates) -> Tensor:
    """Every row whose score reaches the parameter, and always the surest one."""
    return _at_least(rows, rows.parameter_B)


def entropy(rows: Candidates) -> Tensor:
    """Every row whose entropy is at most the parameter, and always the one of the smallest entropy."""
    return _at_least(rows, -rows.parameter_B)


def _at_least(rows: Candidates, limit_B: Tensor) -> Tensor:
    sure_BL = rows.score_BL >= limit_B.unsqueeze(1)
    best_B = _first_equal(rows.score_BL, rows.score_BL.amax(dim=1, keepdim=True))
    return sure_BL.scatter_(1, best_B.unsqueeze(1), True) & rows.masked_BL


def conf_quota(rows: Candidates) -> Tensor:
    """As many of the most confident rows as the parameter says."""
    return (_ranks(-rows.score_BL) < rows.parameter_B.unsqueeze(1)) & rows.masked_BL


def conf_dynamic(rows: Candidates) -> Tensor:
    """The n most confident rows, n as large as every rank k from 2 to n has a confidence of 1 - f/(k + 1) or more.

    f is the parameter; ranks count from 1, and rank 1 passes always.
    """
    sorted_BL, order_BL = rows.score_BL.sort(dim=1, descending=True, stable=True)
    rank_L = torch.arange(1, order_BL.shape[1] + 1, device=order_BL.device)
    passes_BL = sorted_BL >= 1 - rows.parameter_B.unsqueeze(1) / (rank_L + 1)
    passes_BL[:, 0] = True
    chosen_BL = passes_BL.long().cumprod(dim=1).bool()
    return torch.empty_like(chosen_BL).scatter_(1, order_BL, chosen_BL) & rows.masked_BL


def random(rows: Candidates) -> Tensor:
    """A uniform number of rows, 1 to all n masked ones, and a uniform choice of that many.

    With 32-bit words x from Philox: number = 1 + (x n >> 32), x at (0, block start, step, COUNT); its bias is below
    n / 2^32. The choice takes the rows of the smallest x at (0, position, step, CHOICE), equal words by position.
    """
    num_masked_B = rows.masked_BL.sum(dim=1)
    drawn_B = word(DrawKeys(rows.seed_B, rows.block_start_B, rows.step_B), Tag.COUNT)
    count_B = 1 + (drawn_B * num_masked_B >> 32)
    offset_L = torch.arange(rows.masked_BL.shape[1], device=rows.masked_BL.device)
    position_BL = rows.block_start_B.unsqueeze(1) + offset_L
    keys = DrawKeys(
        rows.seed_B.unsqueeze(1).expand_as(position_BL), position_BL, rows.step_B.unsqueeze(1).expand_as(position_BL)
    )
    order_BL = torch.where(rows.masked_BL, word(keys, Tag.CHOICE), 1 << 32)
    return (_ranks(order_BL) < count_B.unsqueeze(1)) & rows.masked_BL


RULES: dict[str, Rule] = {
    "conf_threshold": at_least_parameter,
    "conf_quota": conf_quota,
    "conf_dynamic": conf_dynamic,
    "random": random,
    "entropy": entropy,
    "margin": at_least_parameter,
}
"""A key of UNMASKING_RULES -> the rule."""

RULE_CODES = {"conf_threshold": 0, "conf_quota": 1, "conf_dynamic": 2, "random": 3, "entropy": 4, "margin": 5}
"""A key of UNMASKING_RULES -> what a kernel that mixes rules knows it by."""


def choose(strategies: Sequence[str], rows: Candidates) -> Tensor:
    """Apply to every block its own rule: bool [B, L], the rows to fix."""
    names = set(strategies)
    if len(names) == 1:
        return RULES[names.pop()](rows)
    chosen_BL = torch.zeros_like(rows.masked_BL)
    for name in sorted(names):
        index = torch.tensor([i for i, other in enumerate(strategies) if other == name], device=chosen_BL.device)
        chosen_BL[index] = RULES[name](rows.only(index))
    return chosen_BL


def _ranks(values_BL: Tensor) -> Tensor:
    """Place of each value in ascending order, from 0; equal values by position."""
    order_BL = values_BL.sort(dim=1, stable=True).indices
    places_BL = torch.arange(values_BL.shape[1], device=values_BL.device).expand_as(order_BL)
    return torch.empty_like(order_BL).scatter_(1, order_BL, places_BL)
