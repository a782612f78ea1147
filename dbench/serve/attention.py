"""Attention of packed rows over paged keys and values: one signature, a table of backends.

Shapes: T packed query rows, H heads, D head dim, N pages of one sequence. No causal mask: a row sees every
position of its own canvas and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dbench.serve.kv import KvPool


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The query rows of one sequence, in packed order after those of the sequence before it."""

    num_rows: int
    pages_N: Tensor
    num_keys: int
    """Canvas length: keys from the start of the pages on."""


AttentionLayout = tuple[SequenceLayout, ...]


class AttentionPlan(Protocol):
    """Attention of one layout, ready to run in every layer."""

    def attend(self, q_THD: Tensor, kv: KvPool, layer: int) -> Tensor:
        """[T, H, D] -> [T, H x D], in the order of the layout."""


class AttentionBackend(Protocol):
    """Makes plans: the work that depends on lengths and pages alone is done once per batch."""

    def plan(self, layout: AttentionLayout) -> AttentionPlan: ...


class SdpaBackend:
    """torch's scaled_dot_product_attention, one call per sequence: runs everywhere, pads nothing."""

    def plan(self, layout: AttentionLayout) -> SdpaPlan:
        return SdpaPlan(layout)


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    layout: AttentionLayout

    def attend(self, q_THD: Tensor, kv: KvPool, layer: int) -> Tensor:
        rows = torch.split(q_THD, [sequence.num_rows for sequence in self.layout])
        outputs = [
            _attend_one(q_LHD, kv.gather(layer, sequence.pages_N, sequence.num_keys))
            for q_LHD, sequence in zip(rows, self.layout, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_one(q_LHD: Tensor, kv_2KHD: Tensor) -> Tensor:
    k_1HKD, v_1HKD = kv_2KHD.transpose(1, 2).unsqueeze(1)
    out_1HLD = functional.scaled_dot_product_attention(
        q_LHD.transpose(0, 1).unsqueeze(0), k_1HKD, v_1HKD, enable_gqa=q_LHD.shape[1] != k_1HKD.shape[1]
    )
    return out_1HLD[0].transpose(0, 1).flatten(1)


ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": SdpaBackend}
