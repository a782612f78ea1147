"""The seam between the engine, which plans, and the device, which computes.

A plan names slots and spans, never ids: ids, masks and done flags live in the runner. `attach`,
`launch` and `detach` return without waiting for the device; their effects happen in call order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from dbench.serve.sequence import BlockTask

Ticket = NewType("Ticket", int)


class Phase(StrEnum):
    REFRESH = "refresh"
    DECODE = "decode"


class Operation(StrEnum):
    """What a forward pass spends its time on, where that is measured."""

    QKV = "qkv"
    """The projection of queries, keys and values, with rotary positions and the page write."""
    ATTENTION = "attn"
    MLP = "mlp"
    """With the normalisation before it."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows that one sequence contributes to a batch."""

    slot: int
    phase: Phase
    start: int
    """First canvas position computed."""
    num_rows: int
    written_from: int = 0
    """First canvas position whose K and V are written; rows before it are queries only."""


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What one span of a finished batch did."""

    slot: int
    positions: tuple[int, ...]
    """Canvas positions fixed in this step, ascending."""
    token_ids: tuple[int, ...]
    """Their tokens, in the same order."""
    done: bool
    """The block has ended: no mask is left in it, or none before its first end-of-text id."""
    void: bool
    """The block had already ended at launch: nothing was computed or written for it."""
    error: str
    """Non-finite logits: what was found; else empty. The span then fixed nothing and is done."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished batch, spans in the order of its plan; times on the engine's monotonic clock."""

    spans: tuple[SpanResult, ...]
    launched_s: float
    completed_s: float
    sampling_s: float
    """Seconds spent in choosing tokens and positions, the LM head included on CUDA."""
    device_s: float | None = None
    """Seconds that the device worked on the batch, where it has a clock of its own."""
    operations: Mapping[Operation, float] | None = None
    """Seconds of all layers, in a batch that was sampled for them."""


class LayerWatcher(Protocol):
    """Learns of K and V as they are written, layer by layer, while the batch still runs."""

    def layer_written(self, slots: tuple[int, ...], layer: int, wait: Callable[[], None]) -> None:
        """This layer's K and V of the whole canvas are written for the refreshes in these slots, once `wait` has been
        called: it makes the stream of the thread that calls it wait for them (on a CPU there is nothing to wait for).

        Called for every layer in order, in the thread that launches the batch or in the device's own; it must return
        at once. A batch that fails may leave layers out.
        """


class Runner(Protocol):
    """A device that holds slots and computes spans."""

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        """Give `slot` to a block: its ids, masks by position, rule parameters and page table.

        `pages` cover the whole canvas: position i lies in pages[i // page_size] at i % page_size. With `fixed`, canvas
        position -> token id, the block has been refreshed elsewhere: these are no masks any more, the KV is in the
        pages, and its next span is step 1.
        """

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        """Start one forward pass over the spans and the unmasking that follows it.

        A span whose block has already ended is void. The step number of a span, from 0 = the refresh,
        is the number of spans of its slot launched before it that were not void.
        """

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched batch; tickets are collected in launch order.

        Raises an exception when the batch as a whole failed; its slots must then be detached.
        """

    def detach(self, slot: int) -> None:
        """Take the slot back; its pages may be given to others once earlier launches are complete."""

    def watch_layers(self, watcher: LayerWatcher) -> None:
        """Tell `watcher` of the layers of every refresh from now on."""

    def close(self) -> None:
        """Release the device."""
