"""Kernels that lay out a batch on the device: which rows it has, and which of them need logits.

Shapes: B spans, T packed rows, L block length, S slots, C longest canvas, N most pages of a canvas, R rows that need
logits. Integers are int32 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_PROGRAM = 128
SCAN_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The spans of a launch as the host planned them, one row each of an int32 tensor [4, B + 1] on the device."""

    table: Tensor

    FIRST_ROW, SLOT, START, WRITTEN_FROM = range(4)

    @property
    def num_spans(self) -> int:
        return self.table.shape[1] - 1


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """What is known of every packed row; [T] or longer."""

    token_ids_T: Tensor
    positions_T: Tensor
    places_T: Tensor
    """int64: where K and V go, page x page_size + offset; the pool's last place for rows that write none."""
    block_rows_BL: Tensor
    """[B, L]: the packed row that predicts each position of a span's block."""


@triton.jit
def _pack_kernel(
    spans_ptr, canvas_ptr, pages_ptr, block_start_ptr,
    token_ptr, position_ptr, place_ptr, block_row_ptr,
    table_stride, canvas_stride, pages_stride, last_place, logit_shift,
    PAGE_SIZE: tl.constexpr, L: tl.constexpr, L_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span, part = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(spans_ptr + span)
    num_rows = tl.load(spans_ptr + span + 1) - first_row
    slot = tl.load(spans_ptr + table_stride + span).to(tl.int64)
    start = tl.load(spans_ptr + 2 * table_stride + span)
    written_from = tl.load(spans_ptr + 3 * table_stride + span)
    offset = part * ROWS + tl.arange(0, ROWS)
    inside = offset < num_rows
    position = start + offset
    token = tl.load(canvas_ptr + slot * canvas_stride + position, mask=inside, other=0)
    page = tl.load(pages_ptr + slot * pages_stride + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    place = tl.where(position < written_from, last_place, page * PAGE_SIZE + position % PAGE_SIZE)
    row = first_row + offset
    tl.store(token_ptr + row, token, mask=inside)
    tl.store(position_ptr + row, position, mask=inside)
    tl.store(place_ptr + row, place, mask=inside)
    if part == 0:
        column = tl.arange(0, L_PADDED)
        first_output = first_row + tl.load(block_start_ptr + slot) - logit_shift - start
        tl.store(block_row_ptr + span * L + column, first_output + column, mask=column < L)


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Where the tokens of every slot are; see SlotTable."""

    canvas_SC: Tensor
    pages_SN: Tensor
    block_start_S: Tensor


def pack_rows(
    spans: SpanTable, slots: SlotPlaces, rows: RowBuffers, *, longest_span: int, page_size: int, logit_shift: int,
    last_place: int,
) -> None:  # fmt: skip
    """Fill `rows` for the spans. Does not wait for the device."""
    block_length = rows.block_rows_BL.shape[1]
    _pack_kernel[(spans.num_spans, triton.cdiv(longest_span, ROWS_PER_PROGRAM))](
        spans.table, slots.canvas_SC, slots.pages_SN, slots.block_start_S,
        rows.token_ids_T, rows.positions_T, rows.places_T, rows.block_rows_BL,
        spans.table.stride(0), slots.canvas_SC.stride(0), slots.pages_SN.stride(0), last_place, logit_shift,
        PAGE_SIZE=page_size, L=block_length, L_PADDED=triton.next_power_of_2(block_length), ROWS=ROWS_PER_PROGRAM,
    )  # fmt: skip


@triton.jit
def _compact_kernel(
    slots_ptr, masked_ptr, done_ptr, index_ptr, count_ptr, num_places, num_rows,
    L: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    found = 0
    for first in range(0, num_places, WIDTH):
        place = first + tl.arange(0, WIDTH)
        inside = place < num_places
        slot = tl.load(slots_ptr + place // L, mask=inside, other=0).to(tl.int64)
        masked = tl.load(masked_ptr + slot * L + place % L, mask=inside, other=0).to(tl.int32)
        done = tl.load(done_ptr + slot, mask=inside, other=1).to(tl.int32)
        wanted = (masked != 0) & (done == 0) & inside
        rank = found + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(index_ptr + rank, place, mask=wanted & (rank < num_rows))
        found += tl.sum(wanted.to(tl.int32), 0)
    for first in range(0, num_rows, WIDTH):
        rank = first + tl.arange(0, WIDTH)
        tl.store(index_ptr + rank, tl.zeros([WIDTH], tl.int32), mask=(rank >= found) & (rank < num_rows))
    tl.store(count_ptr, found)


def compact_masked(slots_B: Tensor, masked_SL: Tensor, done_S: Tensor, index_R: Tensor, count: Tensor) -> None:
    """List the places (span x L + offset) that are masked in blocks that have not ended, in order, in `index_R`.

    `count` [1] gets their number; what is left of `index_R` is filled with place 0. Does not wait for the device.
    """
    block_length = masked_SL.shape[1]
    _compact_kernel[(1,)](
        slots_B, masked_SL, done_S, index_R, count, len(slots_B) * block_length, len(index_R),
        L=block_length, WIDTH=SCAN_WIDTH, num_warps=8,
    )  # fmt: skip


def row_buffers(num_rows: int, num_spans: int, block_length: int, device: torch.device) -> RowBuffers:
    """Room for `num_rows` packed rows of `num_spans` spans."""
    return RowBuffers(
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
        torch.zeros(num_spans, block_length, dtype=torch.int32, device=device),
    )
