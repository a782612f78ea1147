"""CUDA graphs of decode passes: one per batch size, captured once, replayed for every batch that fits.

A batch is padded to the next captured size with spans of a slot of their own, whose rows go to a page of nobody.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Graphs of one pass by number of spans; every graph shares one memory pool."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, sizes: Sequence[int], run: Callable[[int], object]) -> None:
        """Capture `run(num_spans)` for every size, the largest first. `run` must have run before, uncaptured."""
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(set(sizes), reverse=True):
            run(size)  # whatever is compiled or reserved at the first call of a size
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(size)
            self._graphs[size] = graph
        self._sizes = sorted(self._graphs)

    def size_for(self, num_spans: int) -> int | None:
        """The smallest captured size that holds so many spans; None if none does."""
        place = bisect_left(self._sizes, num_spans)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Launch a captured pass; does not wait for the device."""
        self._graphs[size].replay()
