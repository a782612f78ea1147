"""CUDA graphs: whole decode passes by batch size, and what lies between attention by number of packed rows.

A decode batch is padded to the next captured size with spans of a slot of their own, whose rows go to a page of
nobody. Where no size fits well, and for refreshes of few rows, the stretches of a pass between the attention of one
layer and that of the next are replayed, and only attention is launched as it is: a pass of a few hundred rows would
otherwise take the host longer than the device. A pass of more rows needs no graph, since the host is ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

LAUNCH_MARGIN = 1.5
"""A pass may take the device this much longer than its launch takes the host, who has other work too."""
TILE_ROWS = 128
"""Rows that a matrix product computes together: padding within them is free."""
MOST_ROWS = 2048
"""Of captured stretches, however slow the host: each number of rows is a graph per layer."""
NUM_TIMED = 3


class DecodeGraphs:
    """Graphs of one pass by number of spans; every graph shares one memory pool."""

    def __init__(self, rows_per_span: int) -> None:
        self._rows_per_span = rows_per_span
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._device_s: dict[int, float] = {}

    def capture(self, sizes: Sequence[int], run: Callable[[int], object]) -> None:
        """Capture `run(num_spans)` for every size, the largest first, and time it."""
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(set(sizes), reverse=True):
            run(size)  # whatever is compiled or reserved at the first call of a size
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(size)
            self._graphs[size] = graph
            self._device_s[size] = _device_seconds(graph.replay)

    def size_for(self, num_spans: int, launch_s: float) -> int | None:
        """The captured size to pad a batch to; None: better or only to be launched in another way, which takes
        the host `launch_s`.
        """
        return padded_size(num_spans, self._device_s, self._rows_per_span, launch_s)

    def replay(self, size: int) -> None:
        """Launch a captured pass; does not wait for the device."""
        self._graphs[size].replay()


def padded_size(num_spans: int, device_s: Mapping[int, float], rows_per_span: int, launch_s: float) -> int | None:
    """The smallest captured size that holds a batch; None if none does, or launching it as it is costs less.

    `device_s`: captured size -> seconds of its pass. Padding is free within a tile of rows. Beyond that it costs the
    device, while a launch of the batch as it is takes the host `launch_s`: whichever is more decides.
    """
    size = next((captured for captured in sorted(device_s) if captured >= num_spans), None)
    if size is None or size == num_spans or _tiles(size * rows_per_span) == _tiles(num_spans * rows_per_span):
        return size
    return None if device_s[size] > LAUNCH_MARGIN * launch_s else size


class StretchGraphs:
    """Graphs of the stretches of a pass, one per layer, by number of packed rows."""

    def __init__(self) -> None:
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}

    def capture(self, most_rows: int, num_stretches: int, run: Callable[[int, int], object], launch_s: float) -> None:
        """Capture `run(number, num_rows)` for every stretch, for growing numbers of rows.

        The last number is the first whose stretches take the device longer than LAUNCH_MARGIN times what a launch
        without graphs takes the host, `launch_s`, and MOST_ROWS or `most_rows` at most.
        """
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for num_rows in captured_rows(min(most_rows, MOST_ROWS)):
                for number in range(num_stretches):
                    run(number, num_rows)  # whatever is reserved at the first call
                stream.synchronize()
                self._graphs[num_rows] = [self._captured(pool, run, n, num_rows) for n in range(num_stretches)]
                if _device_seconds(partial(self._replay_all, num_rows)) > LAUNCH_MARGIN * launch_s:
                    break
        torch.cuda.synchronize()

    def rows_for(self, num_rows: int) -> int | None:
        """The captured number of rows to pad a pass to; None: it needs no graph."""
        return next((captured for captured in sorted(self._graphs) if captured >= num_rows), None)

    def replay(self, number: int, num_rows: int) -> None:
        """Launch one stretch of a captured number of rows; does not wait for the device."""
        self._graphs[num_rows][number].replay()

    def _replay_all(self, num_rows: int) -> None:
        for graph in self._graphs[num_rows]:
            graph.replay()

    def _captured(
        self, pool: Any, run: Callable[[int, int], object], number: int, num_rows: int
    ) -> torch.cuda.CUDAGraph:
        """Without torch.cuda.graph, which collects garbage each time: hundreds of graphs would take half a minute."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)
        run(number, num_rows)
        graph.capture_end()
        return graph


def captured_rows(most_rows: int) -> tuple[int, ...]:
    """Numbers of packed rows that may be captured: half a tile, then whole tiles."""
    return tuple(rows for rows in (TILE_ROWS // 2, *range(TILE_ROWS, most_rows + 1, TILE_ROWS)) if rows <= most_rows)


def host_seconds(launch: Callable[[], object]) -> float:
    """What a launch takes the host: the fastest of a few, the device being idle before each."""
    taken = []
    for _ in range(NUM_TIMED):
        torch.cuda.synchronize()
        started_s = time.monotonic()
        launch()
        taken.append(time.monotonic() - started_s)
    torch.cuda.synchronize()
    return min(taken)


def _tiles(num_rows: int) -> int:
    return -(-num_rows // TILE_ROWS)


def _device_seconds(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(NUM_TIMED):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / NUM_TIMED
