"""Where a forward pass spends its time: marks around the operations of one layer.

A pass tells its marks which layer it enters and when an operation begins and ends; most passes carry marks that do
nothing. Those that measure record device events around one layer, so that nothing waits and the pass is disturbed by
six event records.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dbench.serve.runner import Operation


class Marks(Protocol):
    """Told of the progress of a pass. Must not wait for the device."""

    def enter(self, layer: int) -> None: ...

    def begin(self, operation: Operation) -> None: ...

    def end(self, operation: Operation) -> None: ...


class NoMarks:
    """Measures nothing."""

    def enter(self, layer: int) -> None:
        pass

    def begin(self, operation: Operation) -> None:
        pass

    def end(self, operation: Operation) -> None:
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

    def seconds(self) -> dict[Operation, float]:
        """Time of each operation in all layers; the pass must be complete."""
        return {
            operation: self._begins[operation].elapsed_time(self._ends[operation]) / 1e3 * self._num_layers
            for operation in Operation
        }
