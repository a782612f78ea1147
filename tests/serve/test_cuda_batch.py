"""What the host decides of a launch on CUDA: the order of its rows, and whether a captured pass serves it."""

from __future__ import annotations

import pytest

from dbench.serve.cuda_batch import NOTHING_WRITTEN, largest_shape, lay_out
from dbench.serve.graphs import captured_rows, padded_size
from dbench.serve.runner import Phase, Span

PAD_SLOT = 9


def decode(slot: int, start: int = 40) -> Span:
    return Span(slot, Phase.DECODE, start, 8, start)


def refresh(slot: int, length: int) -> Span:
    return Span(slot, Phase.REFRESH, 0, length)


def test_short_spans_come_first_and_long_ones_keep_their_order() -> None:
    layout = lay_out([refresh(0, 50), decode(1), refresh(2, 20), decode(3)], 8, num_padded=0, pad_slot=PAD_SLOT)
    assert layout.order == (1, 3, 0, 2)
    assert layout.table.tolist() == [[0, 8, 16, 66, 86], [1, 3, 0, 2, 0], [40, 40, 0, 0, 0], [40, 40, 0, 0, 0]]
    assert (layout.shape.num_short, layout.shape.long_lengths, layout.shape.num_rows) == (2, (50, 20), 86)
    assert layout.longest_span == 50


def test_padding_follows_the_short_spans_and_writes_nothing() -> None:
    layout = lay_out([decode(1), decode(3)], 8, num_padded=4, pad_slot=PAD_SLOT)
    assert layout.order == (0, 1)
    assert layout.table[0].tolist() == [0, 8, 16, 24, 32]
    assert layout.table[1, :4].tolist() == [1, 3, PAD_SLOT, PAD_SLOT]
    assert layout.table[3, :4].tolist() == [40, 40, NOTHING_WRITTEN, NOTHING_WRITTEN]


def test_a_canvas_as_short_as_a_block_span_attends_over_its_pages() -> None:
    layout = lay_out([refresh(0, 8), refresh(1, 9)], 8, num_padded=0, pad_slot=PAD_SLOT)
    assert (layout.shape.num_short, layout.shape.long_lengths) == (1, (9,))


@pytest.mark.parametrize(
    ("num_spans", "size"),
    [
        (1, 1),
        (3, 4),  # a launch takes the host longer than the padded pass takes the device
        (8, 8),
        (14, 16),  # four tiles of 128 rows either way
        (12, None),  # three tiles of its own
        (17, None),
        (21, 24),
        (33, None),  # more than any
    ],
)
def test_padding_is_for_batches_that_the_host_could_not_launch_in_time(num_spans: int, size: int | None) -> None:
    device_s = {1: 0.005, 2: 0.005, 4: 0.006, 8: 0.010, 16: 0.018, 24: 0.026, 32: 0.035}
    assert padded_size(num_spans, device_s, rows_per_span=32, launch_s=0.010) == size


@pytest.mark.parametrize(
    ("max_batch_size", "budget", "num_short", "num_long"),
    [
        (128, 4096, 126, 2),
        (128, 64, 127, 1),
        (1, 4096, 0, 1),  # the rows would hold two canvases, but there is one sequence
        (4, 60_000, 0, 4),
    ],
)
def test_the_largest_pass_has_no_more_spans_than_sequences(
    max_batch_size: int, budget: int, num_short: int, num_long: int
) -> None:
    longest = 4096
    num_rows = max_batch_size * 32 + budget + longest
    shape = largest_shape(num_rows, max_batch_size, short_rows=32, longest_canvas=longest)
    assert (shape.num_short, len(shape.long_lengths)) == (num_short, num_long)
    assert shape.num_rows <= num_rows


def test_a_batch_far_below_the_only_size_is_launched_as_it_is() -> None:
    assert padded_size(2, {64: 0.070}, rows_per_span=32, launch_s=0.013) is None


def test_stretches_are_captured_for_half_a_tile_and_whole_tiles() -> None:
    assert captured_rows(500) == (64, 128, 256, 384)
    assert captured_rows(63) == ()
