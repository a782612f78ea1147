"""Floors of a batch on this device, from ceilings measured in this process.

Products: the model's own four matrices per layer, as torch multiplies them, by packed rows. Attention of refreshes at
510 TFLOP/s, of decode steps at K and V bytes over 3.8 TB/s or, for grouped heads, arithmetic at 510 TFLOP/s. The LM
head for masked rows alone. `reachable` adds what every row must read and write between products, at the copy rate.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dbench.serve.families import ModelConfig
from dbench.serve.weights import Weights

if not torch.cuda.is_available():
    sys.exit(
        "benchmark: torch sees no CUDA device here, and what is measured runs on one; give it a machine with a GPU"
    )

REFRESH_FLOPS = 510e12
DECODE_BYTES_PER_S = 3.8e12
ROW_COUNTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_LAYERS_TIMED = 8
"""Enough matrices in turn that none stays in the cache."""


SETTLE_S = 0.25
"""A device under load lowers its clocks after some tenths of a second; a floor is timed at those."""


def seconds_of(step: Callable[[], object], repeats: int = 10) -> float:
    """Median time of one call on a device that has been at it for SETTLE_S."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < SETTLE_S:
        step()
        torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times: list[float] = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return times[len(times) // 2] / 1e3


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source))


@dataclass(frozen=True, slots=True)
class Work:
    """What one batch has to compute."""

    refresh_lengths: tuple[int, ...] = ()
    """Canvas of each refresh."""
    decode_rows: int = 0
    """Rows of all decode spans."""
    decode_keys: tuple[int, ...] = ()
    """Canvas of each decode span."""
    masked_rows: int = 0
    """Rows that need logits."""


@dataclass(frozen=True, slots=True)
class Floors:
    """Ceilings of one model on this device."""

    config: ModelConfig
    bandwidth: float
    layer_seconds: dict[int, float]
    """Packed rows -> products of all layers."""
    head_seconds: dict[int, float]
    element_size: int = 2

    def products(self, rows: int) -> float:
        return _between(self.layer_seconds, rows)

    def floor(self, work: Work) -> float:
        """Seconds below which no batch with this work can run."""
        rows = sum(work.refresh_lengths) + work.decode_rows
        return self.products(rows) + self.attention(work) + _between(self.head_seconds, work.masked_rows)

    def attention(self, work: Work) -> float:
        """The part of refreshes and decode spans that is attention."""
        config = self.config
        flops_per_pair = 4 * config.n_heads * config.head_dim * config.n_layers
        refresh = sum(n * n for n in work.refresh_lengths) * flops_per_pair / REFRESH_FLOPS
        kv_bytes = sum(work.decode_keys) * config.kv_bytes_per_token(self.element_size)
        rows_each = work.decode_rows / max(1, len(work.decode_keys))
        arithmetic = sum(work.decode_keys) * rows_each * flops_per_pair / REFRESH_FLOPS
        return refresh + max(kv_bytes / DECODE_BYTES_PER_S, arithmetic)

    def reachable(self, work: Work) -> float:
        """The floor and what normalisation, rotary positions, pages and the gate must read and write."""
        config = self.config
        rows = sum(work.refresh_lengths) + work.decode_rows
        qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        moved = 4 * config.d_model + 2 * qkv + 3 * config.mlp_hidden_size
        return self.floor(work) + rows * moved * self.element_size * config.n_layers / self.bandwidth


def measure_floors(config: ModelConfig, weights: Weights) -> Floors:
    """Times products and copies; a few seconds."""
    layers = weights.layers[:MAX_LAYERS_TIMED]
    like = weights.embedding_VE
    layer_seconds, head_seconds = {}, {}
    for rows in ROW_COUNTS:

        def room(width: int, rows: int = rows) -> Tensor:
            return torch.randn(rows, width, device="cuda", dtype=torch.float32).to(like.dtype)

        x, hidden, attended = room(config.d_model), room(config.mlp_hidden_size), room(config.n_heads * config.head_dim)
        outs = [room(layers[0].qkv_FE.shape[0]), room(config.d_model), room(2 * config.mlp_hidden_size)]

        def products(x: Tensor = x, hidden: Tensor = hidden, attended: Tensor = attended) -> None:
            for layer in layers:
                torch.mm(x, layer.qkv_FE.t(), out=outs[0])  # noqa: B023
                torch.mm(attended, layer.attn_out_EF.t(), out=outs[1])  # noqa: B023
                torch.mm(x, layer.gate_up_ME.t(), out=outs[2])  # noqa: B023
                torch.mm(hidden, layer.mlp_out_EM.t(), out=outs[1])  # noqa: B023

        layer_seconds[rows] = seconds_of(products) / len(layers) * config.n_layers
        if rows <= 4096:
            logits = room(config.vocab_size)
            head_seconds[rows] = seconds_of(partial(torch.mm, x, weights.lm_head_VE.t(), out=logits))
            del logits
    torch.cuda.empty_cache()
    return Floors(config, copy_bandwidth(), layer_seconds, head_seconds, like.element_size())


def _between(table: dict[int, float], rows: int) -> float:
    """Linear between measured counts, proportional beyond the last, the first below it; 0 for none."""
    counts = sorted(table)
    if not rows:
        return 0.0
    if rows >= counts[-1]:
        return table[counts[-1]] * rows / counts[-1]
    place = bisect_left(counts, rows)
    if place == 0:
        return table[counts[0]]
    low, high = counts[place - 1], counts[place]
    return table[low] + (table[high] - table[low]) * (rows - low) / (high - low)
