"""Batches: which problems, on a canvas of which length, and what is masked for what loss.

Three kinds of rows share a batch. SCATTERED is LLaDA's fine-tuning objective (Nie et al., "Large Language Diffusion
Models", 2025): every position after the prompt is masked with probability t, losses weigh 1 / t. BLOCK is a moment of
decoding by blocks: earlier blocks known, later ones masked, the active one masked with probability t. CACHED is the
same moment as a server sees it that keeps keys and values: the canvas as at the block's refresh, fully masked from the
block on, and in the stream the block with some of it known (see network.py).

Shapes: N problems, B rows, S canvas, L stream, X = S + L, W width of stored rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dbench.serve.families import ModelConfig
from tools.embedded_training.data import SPECIAL_OFFSET, TASK_NAMES, Rows
from tools.embedded_training.network import Streams

STREAM = 32
BLOCK_LENGTHS = (8, 16, 32)
BLOCK_LENGTH_SHARES = (0.15, 0.2, 0.65)
SHAPES = (96, 128, 192, 256)
"""Canvas lengths S. With rows of S + STREAM tokens, batches of all four have the same number of tokens."""
SHAPE_SHARES = (0.25, 0.3, 0.35, 0.1)
MIN_MASKS = 32
"""A problem goes on a canvas only with at least this many positions after its prompt."""

KIND_SHARES = (0.25, 0.2, 0.55)
SCATTERED, BLOCK, CACHED = range(3)
MIN_T = 0.05
FULL_SHARE = 0.2
"""Share of the SCATTERED and BLOCK rows in which t is 1: the first pass of an answer."""
KNOWN_FILL_SHARE = 0.5
"""Share of the CACHED rows in which all after the first end of text is known: decoding fixes the easy part first."""
FILL_WEIGHT = 0.03
"""Loss weight of a position after the first end of text; dozens of them follow every answer."""
LATER_WEIGHT = 0.2
"""Loss weight of positions in blocks after the active one, which get their turn later."""


@dataclass(frozen=True, slots=True)
class Batch:
    streams: Streams
    target_BX: Tensor
    weight_BX: Tensor
    """float32; 0 where nothing is to be predicted."""
    first_pass_BX: Tensor
    """bool: answer positions of CACHED rows as the refresh sees them, by which tasks are compared."""
    task_B: Tensor
    num_answer_tokens: Tensor
    """Scalar: what the weights of the batch are to be divided by."""


class Sampler:
    """Draws batches on the device; all randomness comes from one generator there."""

    def __init__(self, rows: Rows, config: ModelConfig, device: torch.device, seed: int) -> None:
        assert config.mask_token_id is not None
        self._mask_id = config.mask_token_id
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._bytes_NW = torch.from_numpy(rows.bytes_NW).to(device)
        self._prompt_N = torch.from_numpy(rows.prompt_N).to(device).long()
        self._answer_N = torch.from_numpy(rows.answer_N).to(device).long()
        self._task_N = torch.from_numpy(rows.task_N).to(device).long()
        self._fitting = {length: self._fit(length) for length in SHAPES}
        self._kind_shares = torch.tensor(KIND_SHARES, device=device)
        self._length_shares = torch.tensor(BLOCK_LENGTH_SHARES, device=device)
        self._block_lengths = torch.tensor(BLOCK_LENGTHS, device=device)

    def draw(self, shape: int, num_rows: int, task_shares: Tensor) -> Batch:
        """A batch on canvases of length `shape`; `task_shares` need not add up to 1. Does not wait for the device."""
        problem_B = self._problems(shape, num_rows, task_shares)
        prompt_B1 = self._prompt_N[problem_B].unsqueeze(1)
        answer_end_B1 = prompt_B1 + self._answer_N[problem_B].unsqueeze(1)
        stored_BS = self._bytes_NW[problem_B, :shape].long()
        clean_BS = torch.where(stored_BS >= SPECIAL_OFFSET, stored_BS + SPECIAL_OFFSET, stored_BS)
        position_S = torch.arange(shape, device=self._device)
        place = _Place(self, prompt_B1, answer_end_B1)
        masked_BS, weight_BS = place.canvas(position_S)
        position_BL = place.start_B1 + torch.arange(STREAM, device=self._device)
        is_stream_BL = (position_BL < place.end_B1) & (position_BL < shape) & place.is_cached_B1
        position_BL = position_BL.clamp(max=shape - 1)
        clean_BL = clean_BS.gather(1, position_BL)
        masked_BL, weight_BL = place.stream(position_BL, is_stream_BL)
        in_block_BS = (position_S >= place.start_B1) & (position_S < place.end_B1)
        sees_BX = torch.cat((~(in_block_BS & place.is_cached_B1), is_stream_BL), dim=1)
        masked_BX = torch.cat((masked_BS, masked_BL), dim=1)
        target_BX = torch.cat((clean_BS, clean_BL), dim=1)
        position_BX = torch.cat((position_S.expand(num_rows, -1), position_BL), dim=1)
        first_pass_BS = in_block_BS & place.is_cached_B1 & (position_S < answer_end_B1)
        return Batch(
            streams=Streams(torch.where(masked_BX, self._mask_id, target_BX), position_BX, shape, sees_BX, None),
            target_BX=target_BX,
            weight_BX=torch.cat((weight_BS, weight_BL), dim=1),
            first_pass_BX=torch.cat((first_pass_BS, torch.zeros_like(is_stream_BL)), dim=1),
            task_B=self._task_N[problem_B],
            num_answer_tokens=self._answer_N[problem_B].sum(),
        )

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self._device)

    def stratified(self, num_rows: int) -> Tensor:
        """Uniform numbers of low discrepancy, [B, 1] in random order: the spread of t over a batch is even."""
        order = torch.randperm(num_rows, generator=self._generator, device=self._device)
        return ((order + self.uniform(num_rows)) / num_rows).unsqueeze(1)

    def kinds(self, num_rows: int) -> Tensor:
        return self._choose(self._kind_shares, num_rows)

    def block_lengths(self, num_rows: int) -> Tensor:
        return self._block_lengths[self._choose(self._length_shares, num_rows)]

    def _choose(self, shares: Tensor, num_rows: int) -> Tensor:
        """Indices into `shares`, each as often as it says, never one whose share is 0: [B]."""
        edges = shares.cumsum(0)
        return torch.searchsorted(edges, self.uniform(num_rows) * edges[-1], right=True).clamp(max=len(shares) - 1)

    def _fit(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Problems that fit a canvas, task by task; where each task starts among them, and how many it has."""
        room_N = length - self._prompt_N
        fits_N = (room_N >= MIN_MASKS) & (room_N >= self._answer_N)
        problems = fits_N.nonzero().squeeze(1)
        tasks = self._task_N[problems]
        order = tasks.sort(stable=True).indices
        count = torch.bincount(tasks, minlength=len(TASK_NAMES))
        return problems[order], count.cumsum(0) - count, count

    def _problems(self, shape: int, num_rows: int, task_shares: Tensor) -> Tensor:
        problems, first, count = self._fitting[shape]
        task_B = self._choose(task_shares * (count > 0), num_rows)
        offset_B = (self.uniform(num_rows).double() * count[task_B]).long()
        return problems[first[task_B] + offset_B]


class _Place:
    """Kind and active block of every row of a batch, and what they mask. All [B, 1]."""

    def __init__(self, sampler: Sampler, prompt_B1: Tensor, answer_end_B1: Tensor) -> None:
        num_rows = len(prompt_B1)
        self._sampler = sampler
        self._answer_end_B1 = answer_end_B1
        self._prompt_B1 = prompt_B1
        kind_B1 = sampler.kinds(num_rows).unsqueeze(1)
        self._is_scattered_B1 = kind_B1 == SCATTERED
        self.is_cached_B1 = kind_B1 == CACHED
        length_B1 = sampler.block_lengths(num_rows).unsqueeze(1)
        num_blocks_B1 = (answer_end_B1 - prompt_B1 + length_B1 - 1) // length_B1
        block_B1 = (sampler.uniform(num_rows, 1) * num_blocks_B1).long().minimum(num_blocks_B1 - 1)
        self.start_B1 = prompt_B1 + block_B1 * length_B1
        self.end_B1 = self.start_B1 + length_B1
        self._t_B1 = MIN_T + (1.0 - MIN_T) * sampler.stratified(num_rows)

    def canvas(self, position_S: Tensor) -> tuple[Tensor, Tensor]:
        """What is masked on the canvas, and what its prediction weighs."""
        is_full_B1 = self.is_cached_B1 | (self._sampler.uniform(len(self._t_B1), 1) < FULL_SHARE)
        t_B1 = torch.where(is_full_B1, 1.0, self._t_B1)
        drawn_BS = self._sampler.uniform(len(t_B1), len(position_S)) < t_B1
        is_later_BS = (position_S >= self.end_B1) & ~self._is_scattered_B1
        start_B1 = torch.where(self._is_scattered_B1, self._prompt_B1, self.start_B1)
        masked_BS = (position_S >= start_B1) & (drawn_BS | is_later_BS)
        weight_BS = torch.where(is_later_BS, LATER_WEIGHT, 1.0 / t_B1) * self._worth(position_S)
        return masked_BS, weight_BS * masked_BS

    def stream(self, position_BL: Tensor, is_stream_BL: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the block a step later."""
        knows_fill_B1 = self._sampler.uniform(len(self._t_B1), 1) < KNOWN_FILL_SHARE
        drawn_BL = self._sampler.uniform(*position_BL.shape) < self._t_B1
        is_known_BL = knows_fill_B1 & (position_BL >= self._answer_end_B1)
        masked_BL = is_stream_BL & drawn_BL & ~is_known_BL
        return masked_BL, self._worth(position_BL) / self._t_B1 * masked_BL

    def _worth(self, position: Tensor) -> Tensor:
        return torch.where(position < self._answer_end_B1, 1.0, FILL_WEIGHT)
