"""The training loop: optimiser, schedule, averaged weights, log and checkpoints.

The schedule follows whatever limit ends the run, steps or minutes: `progress` is the larger of the two shares.
With a limit in steps alone, a run depends on its seed and on the device's order of additions, on nothing else.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dbench.errors import RunError
from tools.embedded_training.data import TASK_NAMES, TASK_WEIGHTS
from tools.embedded_training.masking import SHAPE_SHARES, SHAPES, STREAM, Batch, Sampler
from tools.embedded_training.network import Network

logger = logging.getLogger(__name__)

REFERENCE_SHAPE = 128
"""`batch` rows are drawn on canvases of this length; on others as many as give the same number of tokens."""
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.05
MAX_GRADIENT_NORM = 1.0
AVERAGE_DECAY = 0.999
FINAL_RATE_SHARE = 0.02
LOG_EVERY = 50
SHARES_EVERY = 200
FIXED_SHARE = 0.5
"""Of every batch: the part divided among tasks by TASK_WEIGHTS; the rest goes where the loss still is."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    batch: int
    peak_rate: float
    warmup_steps: int
    max_steps: int | None
    deadline_s: float | None
    """On time.monotonic()."""
    report_every: int
    seed: int


@dataclass(slots=True)
class Progress:
    """What a run has done so far; goes into the report as it is."""

    step: int = 0
    tokens_seen: int = 0
    """Positions computed, prompts and block streams included."""
    sequences_seen: int = 0
    loss_curve: list[dict[str, float]] = field(default_factory=list)
    task_loss: dict[str, float] = field(default_factory=dict)
    """Mean loss per answer token on the first pass over its block, of late."""
    task_shares: dict[str, float] = field(default_factory=dict)


class Trainer:
    """A network, its optimiser, and the moving average of its weights, which is what gets saved."""

    def __init__(self, network: Network, sampler: Sampler, settings: LoopSettings) -> None:
        self._network = network
        self._sampler = sampler
        self._settings = settings
        device = network.lm_head.device
        self.progress = Progress()
        self.average = Network(network.config, torch.float32).to(device)
        self.average.load_state_dict(network.state_dict())
        self._parameters = list(network.parameters())
        self._average_parameters = [parameter.detach() for parameter in self.average.parameters()]
        self._optimiser = make_optimiser(network, settings.peak_rate)
        self._shapes = random.Random(settings.seed)
        self._shares = TaskShares(device)

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train to the limit; `report` is called every `report_every` steps and at the end."""
        settings, progress = self._settings, self.progress
        started_s = time.monotonic()
        losses: list[Tensor] = []
        while (share := self._share_done(started_s)) < 1.0:
            rate = settings.peak_rate * rate_factor(progress.step, settings.warmup_steps, share)
            losses.append(self._step(rate))
            progress.step += 1
            if progress.step % LOG_EVERY == 0:
                self._log(losses, rate, time.monotonic() - started_s)
                losses = []
            if progress.step % SHARES_EVERY == 0:
                progress.task_loss, progress.task_shares = self._shares.update()
            if progress.step % settings.report_every == 0:
                report(progress)
        if losses:
            self._log(losses, rate, time.monotonic() - started_s)
        if progress.step % settings.report_every:
            report(progress)

    def _share_done(self, started_s: float) -> float:
        settings = self._settings
        shares = [0.0]
        if settings.max_steps is not None:
            shares.append(self.progress.step / settings.max_steps)
        if settings.deadline_s is not None:
            available_s = max(settings.deadline_s - started_s, 1e-9)
            shares.append((time.monotonic() - started_s) / available_s)
        return max(shares)

    def _step(self, rate: float) -> Tensor:
        """One update; gives the loss without waiting for it."""
        (shape,) = self._shapes.choices(SHAPES, SHAPE_SHARES)
        num_rows = max(1, tokens_per_step(self._settings.batch) // (shape + STREAM))
        batch = self._sampler.draw(shape, num_rows, self._shares.share_K)
        loss, loss_BX = weighted_loss(self._network, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM, foreach=True)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._shares.add(loss_BX, batch)
        decay = min(AVERAGE_DECAY, (1 + self.progress.step) / (10 + self.progress.step))
        torch._foreach_lerp_(self._average_parameters, [p.detach() for p in self._parameters], 1.0 - decay)
        self.progress.tokens_seen += num_rows * (shape + STREAM)
        self.progress.sequences_seen += num_rows
        return loss.detach()

    def _log(self, losses: list[Tensor], rate: float, elapsed_s: float) -> None:
        """Note the mean loss of the last steps; waits for the device."""
        progress = self.progress
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise RunError(f"training diverged at step {progress.step}: loss {loss}; try a smaller --rate")
        progress.loss_curve.append(
            {"step": progress.step, "seconds": round(elapsed_s, 1), "rate": round(rate, 7), "loss": round(loss, 5)}
        )
        if progress.step % (10 * LOG_EVERY) == 0:
            logger.info(
                "step %d  %.0f s  rate %.2g  loss %.4f  %.0f tokens/s",
                *(progress.step, elapsed_s, rate, loss, progress.tokens_seen / elapsed_s),
            )


class TaskShares:
    """How much of a batch each task gets, from how well it goes. Shapes: K tasks, B rows, X positions."""

    def __init__(self, device: torch.device) -> None:
        weights_K = torch.tensor([float(TASK_WEIGHTS[name]) for name in TASK_NAMES], device=device)
        self._fixed_K = weights_K / weights_K.sum()
        self.share_K = self._fixed_K
        self._loss_K = torch.zeros_like(weights_K)
        self._count_K = torch.zeros_like(weights_K)

    def add(self, loss_BX: Tensor, batch: Batch) -> None:
        """Count the losses of answers as their first pass sees them. Does not wait for the device."""
        self._loss_K.index_add_(0, batch.task_B, (loss_BX * batch.first_pass_BX).sum(dim=1))
        self._count_K.index_add_(0, batch.task_B, batch.first_pass_BX.sum(dim=1).float())

    def update(self) -> tuple[dict[str, float], dict[str, float]]:
        """Set the shares by the losses since the last call; gives both by task."""
        mean_K = self._loss_K / self._count_K.clamp(min=1.0)
        self.share_K = FIXED_SHARE * self._fixed_K + (1.0 - FIXED_SHARE) * mean_K / mean_K.sum().clamp(min=1e-9)
        self._loss_K.zero_()
        self._count_K.zero_()
        return self._by_task(mean_K), self._by_task(self.share_K)

    def _by_task(self, values_K: Tensor) -> dict[str, float]:
        return {name: round(value, 5) for name, value in zip(TASK_NAMES, values_K.tolist(), strict=True)}


def tokens_per_step(batch: int) -> int:
    return batch * (REFERENCE_SHAPE + STREAM)


def weighted_loss(network: Network, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a batch per answer token, and every position's cross entropy, [B, X], without its gradient."""
    logits_TV = network(batch.streams).flatten(0, 1).float()
    loss_T = cross_entropy(logits_TV, batch.target_BX.flatten(), reduction="none")
    loss_BX = loss_T.view_as(batch.weight_BX)
    return (loss_BX * batch.weight_BX).sum() / batch.num_answer_tokens, loss_BX.detach()


def rate_factor(step: int, warmup_steps: int, share_done: float) -> float:
    """Linear warm-up, then half a cosine down to FINAL_RATE_SHARE."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share_done)))
    return FINAL_RATE_SHARE + (1.0 - FINAL_RATE_SHARE) * cosine


def make_optimiser(network: Network, rate: float) -> torch.optim.AdamW:
    """AdamW; only the layers' matrices decay."""
    layers = {id(parameter) for parameter in network.layers.parameters() if parameter.dim() == 2}
    decayed = [parameter for parameter in network.parameters() if id(parameter) in layers]
    others = [parameter for parameter in network.parameters() if id(parameter) not in layers]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=1e-8, fused=network.lm_head.is_cuda)
