"""Answers of a network to held-out problems, decoded by blocks and confidence threshold, and what they are worth.

Everything is computed anew in every pass. With `kept_keys` the result is that of a server that keeps keys and values
between a block's refresh and its end: the canvas stays as the refresh saw it and the block goes through the stream.

Shapes: B problems, C longest canvas, L block length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbench.load.tasks import TASKS, Problem, check
from tools.embedded_training.data import ChatFrame
from tools.embedded_training.network import Network, Streams

ALIGNMENT = 16
"""Canvases are padded to a multiple of this, which suits the attention kernels' masks."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    gen_length: int = 64
    block_length: int = 32
    threshold: float = 0.9
    kept_keys: bool = True
    batch_size: int = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """One decoded problem."""

    problem: Problem
    text: str
    num_tokens: int
    """Returned: up to the first end of text, that id included."""
    num_passes: int

    @property
    def is_right(self) -> bool:
        return check(self.problem, self.text)


@dataclass(frozen=True, slots=True)
class Score:
    """Answers of one task, or of all."""

    num_problems: int
    num_right: int
    num_tokens: int
    num_passes: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_problems

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes

    def to_dict(self) -> dict[str, float]:
        return {
            "num_problems": self.num_problems,
            "num_right": self.num_right,
            "accuracy": round(self.accuracy, 4),
            "tokens_per_forward_pass": round(self.tokens_per_pass, 3),
        }


def score(answers: Sequence[Answer]) -> dict[str, Score]:
    """Task -> score, for every task that was asked, and 'all'."""
    groups = {task: [answer for answer in answers if answer.problem.task == task] for task in TASKS}
    groups["all"] = list(answers)
    return {
        name: Score(
            len(group),
            sum(answer.is_right for answer in group),
            sum(answer.num_tokens for answer in group),
            sum(answer.num_passes for answer in group),
        )
        for name, group in groups.items()
        if group
    }


def table(scores: dict[str, Score]) -> str:
    """Lines of text: task, right answers, accuracy, tokens per forward pass."""
    lines = [f"{'task':<12} {'right':>11} {'accuracy':>9} {'tokens/pass':>12}"]
    for name, result in scores.items():
        right = f"{result.num_right}/{result.num_problems}"
        lines.append(f"{name:<12} {right:>11} {result.accuracy:>9.1%} {result.tokens_per_pass:>12.2f}")
    return "\n".join(lines)


def answer_all(
    network: Network, frame: ChatFrame, problems: Sequence[Problem], settings: DecodeSettings
) -> list[Answer]:
    """Decode problems in batches, in their order."""
    answers: list[Answer] = []
    for first in range(0, len(problems), settings.batch_size):
        some = problems[first : first + settings.batch_size]
        canvas = _Canvas(network, [frame.prompt_ids(problem.prompt) for problem in some], settings)
        for start in range(0, settings.gen_length, settings.block_length):
            canvas.decode_block(start)
        passes = canvas.passes_B.tolist()
        for problem, ids, num_passes in zip(some, canvas.answers(), passes, strict=True):
            text = bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")
            answers.append(Answer(problem, text, len(ids), num_passes))
    return answers


class _Canvas:
    """A batch of prompts with masks after them, and how far each is decoded. Padding on the right is never seen."""

    def __init__(self, network: Network, prompts: Sequence[list[int]], settings: DecodeSettings) -> None:
        config = network.config
        assert config.mask_token_id is not None
        device = network.lm_head.device
        self._network = network
        self._settings = settings
        self._mask_id = config.mask_token_id
        self._end_ids = torch.tensor(config.eos_token_ids, device=device)
        needed = max(len(ids) for ids in prompts) + settings.gen_length
        longest = -(-needed // ALIGNMENT) * ALIGNMENT
        rows = [ids + [self._mask_id] * (longest - len(ids)) for ids in prompts]
        self._token_BC = torch.tensor(rows, device=device)
        self._prompt_B1 = torch.tensor([[len(ids)] for ids in prompts], device=device)
        self._position_BC = torch.arange(longest, device=device).expand(len(prompts), -1)
        self._sees_BC = self._position_BC < self._prompt_B1 + settings.gen_length
        self._is_finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.passes_B = torch.zeros(len(prompts), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def decode_block(self, start: int) -> None:
        """Decode the block at offset `start` of every answer that has not ended."""
        place_BL = self._prompt_B1 + start + torch.arange(self._settings.block_length, device=self._token_BC.device)
        masked_BL = torch.ones_like(place_BL, dtype=torch.bool)
        is_live_B = ~self._is_finished_B
        refreshed_BC = self._token_BC.clone()
        is_refresh = True
        while bool(is_live_B.any()):
            if is_refresh or not self._settings.kept_keys:
                logits_BLV = self._canvas_logits(place_BL)
            else:
                logits_BLV = self._stream_logits(refreshed_BC, place_BL)
            is_refresh = False
            token_BL, chosen_BL = self._choose(logits_BLV, masked_BL)
            chosen_BL &= is_live_B.unsqueeze(1)
            ids_BL = torch.where(chosen_BL, token_BL, self._token_BC.gather(1, place_BL))
            self._token_BC.scatter_(1, place_BL, ids_BL)
            masked_BL &= ~chosen_BL
            self.passes_B += is_live_B
            first_mask_B = _first(masked_BL)
            first_end_B = _first(torch.isin(ids_BL, self._end_ids) & ~masked_BL)
            has_ended_B = first_end_B < first_mask_B
            self._is_finished_B |= has_ended_B & is_live_B
            is_live_B &= ~has_ended_B & masked_BL.any(dim=1)

    def answers(self) -> list[list[int]]:
        """Ids of every answer up to its first end of text, or all of them."""
        ends = set(self._end_ids.tolist())
        found = []
        for row, (start,) in zip(self._token_BC.tolist(), self._prompt_B1.tolist(), strict=True):
            ids = row[start : start + self._settings.gen_length]
            end = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
            found.append(ids[:end])
        return found

    def _canvas_logits(self, place_BL: Tensor) -> Tensor:
        streams = Streams(self._token_BC, self._position_BC, self._token_BC.shape[1], None, self._sees_BC)
        logits_BCV: Tensor = self._network(streams)
        place_BLV = place_BL.unsqueeze(2).expand(-1, -1, logits_BCV.shape[2])
        return logits_BCV.gather(1, place_BLV).float()

    def _stream_logits(self, refreshed_BC: Tensor, place_BL: Tensor) -> Tensor:
        length = refreshed_BC.shape[1]
        in_block_BC = (self._position_BC >= place_BL[:, :1]) & (self._position_BC <= place_BL[:, -1:])
        streams = Streams(
            token_BX=torch.cat((refreshed_BC, self._token_BC.gather(1, place_BL)), dim=1),
            position_BX=torch.cat((self._position_BC, place_BL), dim=1),
            canvas_length=length,
            stream_sees_BX=torch.cat(
                (self._sees_BC & ~in_block_BC, torch.ones_like(place_BL, dtype=torch.bool)), dim=1
            ),
            canvas_sees_BS=self._sees_BC,
        )
        logits_BLV: Tensor = self._network(streams)[:, length:].float()
        return logits_BLV

    def _choose(self, logits_BLV: Tensor, masked_BL: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of every position, and the masked positions sure enough, or the surest of them."""
        logits_BLV[..., self._mask_id] = -torch.inf
        confidence_BL, token_BL = logits_BLV.softmax(dim=-1).max(dim=-1)
        confidence_BL = torch.where(masked_BL, confidence_BL, -1.0)
        best_B1 = confidence_BL.argmax(dim=1, keepdim=True)
        chosen_BL = (confidence_BL >= self._settings.threshold).scatter(1, best_B1, True) & masked_BL
        return token_BL, chosen_BL


def _first(flags_BL: Tensor) -> Tensor:
    """Offset of the first True of every row; the row's length if there is none."""
    length = flags_BL.shape[1]
    offsets_L = torch.arange(length, device=flags_BL.device)
    return torch.where(flags_BL, offsets_L, length).amin(dim=1)
