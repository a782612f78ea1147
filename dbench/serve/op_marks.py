"""Where a forward pass spends its time: marks around the operations of one layer.

A pass tells its marks which layer it enters and when an operation begins and ends; most passes carry marks that do
nothing. Those that measure record device events around one layer, so that nothing waits and the pass is disturbed by
six event records.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dbench.serve.runner import LayerWatcher, Operation, Phase, Span


class Marks(Protocol):
    """Told of the progress of a pass. Must not wait for the device."""

    def enter(self, layer: int) -> None: ...

    def begin(self, operation: Operation) -> None: ...

    def end(self, operation: Operation) -> None: ...

    def written(self, layer: int) -> None:
        """Its K and V are in the pages once what is queued has run."""


class NoMarks:
    """Measures nothing."""

    def enter(self, layer: int) -> None:
        pass

    def begin(self, operation: Operation) -> None:
        pass

    def end(self, operation: Operation) -> None:
        pass

    def written(self, layer: int) -> None:
        pass


NO_MARKS: Marks = NoMarks()


class LayerMarks:
    """Device events around the operations of one layer; `seconds` scales them to all layers."""

    def __init__(self, layer: int, num_layers: int, *, in_graph: bool) -> None:
        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True, external=in_graph)

        self._layer = layer
        self._num_layers = num_layers
        self._is_inside = False
        self._begins = {operation: event() for operation in Operation}
        self._ends = {operation: event() for operation in Operation}

    def enter(self, layer: int) -> None:
        self._is_inside = layer == self._layer

    def begin(self, operation: Operation) -> None:
        if self._is_inside:
            self._begins[operation].record()

    def end(self, operation: Operation) -> None:
        if self._is_inside:
            self._ends[operation].record()

    def written(self, layer: int) -> None:
        pass

    def seconds(self) -> dict[Operation, float]:
        """Time of each operation in all layers; the pass must be complete."""
        return {
            operation: self._begins[operation].elapsed_time(self._ends[operation]) / 1e3 * self._num_layers
            for operation in Operation
        }


def watched(marks: Marks, watcher: LayerWatcher | None, spans: tuple[Span, ...]) -> Marks:
    """The marks, which also tell the watcher of the refreshes among the spans, if there are both."""
    refreshed = tuple(span.slot for span in spans if span.phase is Phase.REFRESH)
    return marks if watcher is None or not refreshed else WatchedMarks(marks, watcher, refreshed)


class WatchedMarks:
    """Passes everything on to other marks, and tells a watcher of every layer, with an event to wait for."""

    def __init__(self, marks: Marks, watcher: LayerWatcher, slots: tuple[int, ...]) -> None:
        self._marks = marks
        self._watcher = watcher
        self._slots = slots

    def enter(self, layer: int) -> None:
        self._marks.enter(layer)

    def begin(self, operation: Operation) -> None:
        self._marks.begin(operation)

    def end(self, operation: Operation) -> None:
        self._marks.end(operation)

    def written(self, layer: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._watcher.layer_written(self._slots, layer, event.wait)
