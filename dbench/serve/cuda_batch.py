"""What the host prepares of a launch on CUDA: the spans in packed order, and the table that tells the device.

Shapes: B spans, L block length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dbench.serve.runner import Span

NOTHING_WRITTEN = 2**31 - 1
"""As `written_from`: past every position."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How the rows of a launch divide into spans."""

    num_short: int
    """Spans of `short_rows` rows each; they come first."""
    short_rows: int
    long_lengths: tuple[int, ...]
    """Rows of each long span."""

    @property
    def num_spans(self) -> int:
        return self.num_short + len(self.long_lengths)

    @property
    def num_short_rows(self) -> int:
        return self.num_short * self.short_rows

    @property
    def num_rows(self) -> int:
        return self.num_short_rows + sum(self.long_lengths)


def largest_shape(num_rows: int, num_spans: int, *, short_rows: int, longest_canvas: int) -> BatchShape:
    """The most that `num_rows` rows and `num_spans` spans hold: as many of the longest canvases as fit beside a short
    span for every other sequence, at least one.
    """
    rows_left = num_rows - (num_spans - 1) * short_rows
    num_long = max(1, min(rows_left // longest_canvas, num_spans))
    return BatchShape(num_spans - num_long, short_rows, (longest_canvas,) * num_long)


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The largest pass: what memory is reserved for."""

    num_rows: int
    num_spans: int
    block_length: int
    short_rows: int
    longest_canvas: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A launch in packed order: short spans, then padding, then long spans."""

    shape: BatchShape
    order: tuple[int, ...]
    """Packed place -> index of the planned span, padding left out."""
    table: NDArray[np.int32]
    """[4, B + 1]: first row, slot, start, written_from; see SpanTable."""
    longest_span: int


def lay_out(spans: Sequence[Span], short_rows: int, *, num_padded: int, pad_slot: int) -> Layout:
    """Pack spans, the short ones padded to `num_padded` with spans of `pad_slot` that write nothing.

    Spans of `short_rows` rows attend over pages; any other span covers its whole canvas.
    """
    short = [index for index, span in enumerate(spans) if span.num_rows == short_rows]
    long = [index for index, span in enumerate(spans) if span.num_rows != short_rows]
    num_short = max(num_padded, len(short))
    padding = num_short - len(short)
    assert not padding or not long, "long spans cannot follow padding"
    num_spans = num_short + len(long)
    table = np.zeros((4, num_spans + 1), dtype=np.int32)
    table[0, 1 : num_short + 1] = short_rows
    table[1, len(short) : num_short] = pad_slot
    table[3, len(short) : num_short] = NOTHING_WRITTEN
    for place, index in enumerate((*short, *long)):
        span = spans[index]
        table[0, place + 1] = span.num_rows
        table[1:, place] = span.slot, span.start, span.written_from
    np.cumsum(table[0], out=table[0])
    assert all(spans[index].start == 0 for index in long), "a long span does not start its canvas"
    lengths = tuple(spans[index].num_rows for index in long)
    return Layout(BatchShape(num_short, short_rows, lengths), (*short, *long), table, max((short_rows, *lengths)))
