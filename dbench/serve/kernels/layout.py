"""Kernels that lay out a batch on the device: which rows it has, and which of them need logits.

Shapes: B spans, T packed rows, L block length, S slots, C longest canvas, N most pages of a canvas, R rows that need
logits. Integers are int32 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dbench.serve.batch import SlotTable
from dbench.serve.sequence import BlockTask
from dbench.serve.unmask import RULE_CODES

ROWS_PER_PROGRAM = 128
SCAN_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The spans of a launch as the host planned them, one row each of an int32 tensor [4, B + 1] on the device."""

    table: Tensor
    """First packed row, slot, start, written_from."""

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
    block_positions_BL: Tensor
    """[B, L]: the canvas position of that row."""


@triton.jit
def _pack_kernel(
    spans_ptr, canvas_ptr, pages_ptr, block_start_ptr,
    token_ptr, position_ptr, place_ptr, block_row_ptr, block_position_ptr,
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
        block_position = tl.load(block_start_ptr + slot) - logit_shift + column
        tl.store(block_position_ptr + span * L + column, block_position, mask=column < L)
        tl.store(block_row_ptr + span * L + column, first_row + block_position - start, mask=column < L)


def pack_rows(
    spans: SpanTable, slots: SlotTable, rows: RowBuffers, *, longest_span: int, logit_shift: int, last_place: int
) -> None:
    """Fill `rows` for the spans. Does not wait for the device."""
    block_length = rows.block_rows_BL.shape[1]
    _pack_kernel[(spans.num_spans, triton.cdiv(longest_span, ROWS_PER_PROGRAM))](
        spans.table, slots.canvas_SC, slots.pages_SN, slots.block_start_S,
        rows.token_ids_T, rows.positions_T, rows.places_T, rows.block_rows_BL, rows.block_positions_BL,
        spans.table.stride(0), slots.canvas_SC.stride(0), slots.pages_SN.stride(0), last_place, logit_shift,
        PAGE_SIZE=slots.sizes.page_size, L=block_length, L_PADDED=triton.next_power_of_2(block_length),
        ROWS=ROWS_PER_PROGRAM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_places", "num_rows"])
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


HEADER = 9
"""Numbers of an attachment before its token ids and pages; see attachment."""


@triton.jit(do_not_specialize=["slot"])
def _attach_kernel(
    message_ptr, canvas_ptr, pages_ptr, masked_ptr, done_ptr, ignore_eos_ptr, block_start_ptr, step_ptr, seed_ptr,
    temperature_ptr, parameter_ptr, rule_ptr, length_ptr, slot, canvas_stride, pages_stride, mask_token,
    L: tl.constexpr, L_PADDED: tl.constexpr, HEADER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    num_tokens = tl.load(message_ptr)
    num_pages = tl.load(message_ptr + 1)
    slot = slot.to(tl.int64)
    part = tl.program_id(0)
    at = part * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(message_ptr + HEADER + at, mask=at < num_tokens, other=mask_token)
    tl.store(canvas_ptr + slot * canvas_stride + at, token, mask=at < canvas_stride)
    page = tl.load(message_ptr + HEADER + num_tokens + at, mask=at < num_pages, other=0)
    tl.store(pages_ptr + slot * pages_stride + at, page, mask=at < num_pages)
    if part == 0:
        tl.store(length_ptr + slot, tl.load(message_ptr + 2))
        tl.store(seed_ptr + slot, tl.load(message_ptr + 3))
        tl.store(ignore_eos_ptr + slot, tl.load(message_ptr + 4) != 0)
        tl.store(rule_ptr + slot, tl.load(message_ptr + 5).to(tl.int32))
        tl.store(temperature_ptr + slot, tl.load(message_ptr + 6).to(tl.int32).to(tl.float32, bitcast=True))
        tl.store(parameter_ptr + slot, tl.load(message_ptr + 7).to(tl.int32).to(tl.float32, bitcast=True))
        tl.store(done_ptr + slot, tl.load(message_ptr + 8) != 0)
        tl.store(block_start_ptr + slot, num_tokens)
        tl.store(step_ptr + slot, num_tokens * 0)
        offset = tl.arange(0, L_PADDED)
        tl.store(masked_ptr + slot * L + offset, offset >= 0, mask=offset < L)


def attachment(task: BlockTask, pages: tuple[int, ...]) -> list[int]:
    """Everything that a slot is told of a block, as int64 numbers; floats by their bits."""
    sampling = task.sampling
    numbers = np.array([sampling.temperature, sampling.parameter or 0.0], dtype=np.float32).view(np.int32).tolist()
    header = [
        len(task.token_ids), len(pages), task.canvas_length, task.request_seed, int(task.ignore_eos),
        RULE_CODES[sampling.unmasking_strategy], *numbers, 0,
    ]  # fmt: skip
    assert len(header) == HEADER
    return [*header, *task.token_ids, *pages]


def attach_slot(slot: int, message: Tensor, table: SlotTable) -> None:
    """Give a slot to the block that `attachment` described: prompt, masks after it, step 0. Does not wait."""
    length, longest = table.masked_SL.shape[1], table.canvas_SC.shape[1]
    _attach_kernel[(triton.cdiv(longest, SCAN_WIDTH),)](
        message, table.canvas_SC, table.pages_SN, table.masked_SL, table.done_S, table.ignore_eos_S,
        table.block_start_S, table.step_S, table.seed_S, table.temperature_S, table.parameter_S, table.rule_S,
        table.length_S, slot, longest, table.pages_SN.shape[1], table.sizes.mask_token_id,
        L=length, L_PADDED=triton.next_power_of_2(length), HEADER=HEADER, WIDTH=SCAN_WIDTH, num_warps=4,
    )  # fmt: skip


def row_buffers(num_rows: int, num_spans: int, block_length: int, device: torch.device) -> RowBuffers:
    """Room for `num_rows` packed rows of `num_spans` spans."""
    return RowBuffers(
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
        torch.zeros(num_spans, block_length, dtype=torch.int32, device=device),
        torch.zeros(num_spans, block_length, dtype=torch.int32, device=device),
    )
