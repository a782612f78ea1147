"""The paged pool of keys and values.

Shapes: T packed rows, N pages of one sequence, H KV heads, D head dim. A slot is a place for one token:
slot = page x page_size + offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dbench.serve.families import ModelConfig
from dbench.serve.runner import Runner


class PageStore(Protocol):
    """The KV pages of a runner."""

    @property
    def num_layers(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Of one page in one layer."""

    @property
    def device(self) -> torch.device: ...

    def read_pages(self, layer: int, pages: Sequence[int]) -> Tensor:
        """A copy, one-dimensional uint8."""

    def write_pages(self, layer: int, pages: Sequence[int], data: Tensor) -> None:
        """The inverse of read_pages."""


class KvRunner(Runner, Protocol):
    """A runner whose pages can be sent and received."""

    @property
    def kv(self) -> PageStore: ...


class KvPool:
    """K and V, RoPE already applied, of every layer: [layers, 2, pages + 1, page_size, H, D].

    The last page belongs to nobody: rows with slot -1 fall into its last place (an index of -1 counts from the
    end), so that a write needs no look at its slots, which on a GPU would be a synchronisation.
    """

    def __init__(self, config: ModelConfig, *, num_pages: int, page_size: int, like: Tensor) -> None:
        """`like` gives number format and device."""
        self.num_pages = num_pages
        shape = (config.n_layers, 2, num_pages + 1, page_size, config.n_kv_heads, config.head_dim)
        self._pool = _zeros(shape, like)
        self._slots = self._pool.flatten(2, 3)

    def write(self, layer: int, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor) -> None:
        """Store rows at their slots; a row with slot -1 is skipped."""
        self._slots[layer, 0][slots_T] = k_THD
        self._slots[layer, 1][slots_T] = v_THD

    @property
    def num_layers(self) -> int:
        return len(self._pool)

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def read_pages(self, layer: int, pages: Sequence[int]) -> Tensor:
        """A copy of a layer's keys and values in whole pages, as bytes; `write_pages` of a pool like this takes it."""
        pages_N = torch.tensor(pages, dtype=torch.int64, device=self.device)
        return self._pool[layer].index_select(1, pages_N).flatten().view(torch.uint8)

    def write_pages(self, layer: int, pages: Sequence[int], data: Tensor) -> None:
        """Fill whole pages with what `read_pages` gave. Raises ValueError for bytes of another number of pages."""
        if data.numel() != self.page_bytes * len(pages):
            raise ValueError(f"{data.numel()} bytes for {len(pages)} pages of {self.page_bytes} bytes per layer")
        shape = (2, len(pages), *self._pool.shape[3:])
        pages_N = torch.tensor(pages, dtype=torch.int64, device=self.device)
        self._pool[layer].index_copy_(1, pages_N, data.view(self._pool.dtype).view(shape))

    @property
    def page_bytes(self) -> int:
        """Of one page in one layer, keys and values."""
        return 2 * math.prod(self._pool.shape[3:]) * self._pool.element_size()

    def layer(self, number: int) -> Tensor:
        """All places of one layer, [2, places, H, D]; the last place is nobody's."""
        return self._slots[number]

    @property
    def last_place(self) -> int:
        """Where rows go whose K and V nobody reads."""
        return self._slots.shape[2] - 1

    def gather(self, layer: int, pages_N: Tensor, length: int) -> Tensor:
        """A copy of the first `length` keys and values of the pages: [2, length, H, D]."""
        return self._pool[layer].index_select(1, pages_N).flatten(1, 2)[:, :length]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros that the system fills in where they are first touched, on CPUs: 5 GB at once take 2 s of a start,
    17 s where memory is short, and most runs use a part of them.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    raw = torch.from_numpy(np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8))
    return raw.view(like.dtype).view(shape)
