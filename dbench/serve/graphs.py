"""CUDA graphs of decode passes: one per batch size, captured once, replayed for every batch that fits.

A batch is padded to the next captured size with spans of a slot of their own, whose rows go to a page of nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

LAUNCH_MARGIN = 1.5
"""A padded pass may take the device this much longer than a launch takes the host, who has other work too."""
TILE_ROWS = 128
"""Rows that a matrix product computes together: padding within them is free."""
NUM_TIMED = 3


class DecodeGraphs:
    """Graphs of one pass by number of spans; every graph shares one memory pool.

    A large batch between two sizes is better launched without a graph: padding costs the device more than launching
    costs the host, which is ahead of it.
    """

    def __init__(self, rows_per_span: int) -> None:
        self._rows_per_span = rows_per_span
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._device_s: dict[int, float] = {}
        self._launch_s = 0.0

    def capture(self, sizes: Sequence[int], run: Callable[[int], object]) -> None:
        """Capture `run(num_spans)` for every size, the largest first, and time both ways to launch it."""
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(set(sizes), reverse=True):
            run(size)  # whatever is compiled or reserved at the first call of a size
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(size)
            self._graphs[size] = graph
            self._device_s[size] = _device_seconds(graph.replay)
            self._launch_s = max(self._launch_s, _host_seconds(partial(run, size)))

    def size_for(self, num_spans: int) -> int | None:
        """The captured size to pad a batch to; None: better or only to be launched without a graph."""
        return padded_size(num_spans, self._device_s, self._rows_per_span, self._launch_s)

    def replay(self, size: int) -> None:
        """Launch a captured pass; does not wait for the device."""
        self._graphs[size].replay()


def padded_size(num_spans: int, device_s: Mapping[int, float], rows_per_span: int, launch_s: float) -> int | None:
    """The smallest captured size that holds a batch; None if none does, or launching it as it is costs less.

    `device_s`: captured size -> seconds of its pass. Padding is free within a tile of rows. Beyond that it costs the
    device, while a launch without a graph takes the host `launch_s`: whichever is more decides.
    """
    size = next((captured for captured in sorted(device_s) if captured >= num_spans), None)
    if size is None or size == num_spans or _tiles(size, rows_per_span) == _tiles(num_spans, rows_per_span):
        return size
    return None if device_s[size] > LAUNCH_MARGIN * launch_s else size


def _tiles(num_spans: int, rows_per_span: int) -> int:
    return -(-num_spans * rows_per_span // TILE_ROWS)


def _device_seconds(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(NUM_TIMED):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / NUM_TIMED


def _host_seconds(launch: Callable[[], object]) -> float:
    """The fastest of a few launches, the device being idle before each."""
    taken = []
    for _ in range(NUM_TIMED):
        torch.cuda.synchronize()
        started_s = time.monotonic()
        launch()
        taken.append(time.monotonic() - started_s)
    torch.cuda.synchronize()
    return min(taken)
