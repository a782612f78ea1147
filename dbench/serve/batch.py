"""Slot state on the device, and the packed tensors that a launch makes of it.

Shapes: S slots, C longest canvas, N most pages of a canvas, L block length, B spans of a launch, T packed rows,
R output rows: those whose logits are needed, the still masked positions of each span's block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dbench.serve.attention import AttentionLayout, SequenceLayout
from dbench.serve.runner import Span
from dbench.serve.sequence import BlockTask
from dbench.serve.unmask import RULE_CODES


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """How much room the slots have, and the id that stands at masked positions."""

    num_slots: int
    max_canvas: int
    block_length: int
    page_size: int
    mask_token_id: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Attached:
    """What the host keeps of a slot: nothing here changes while the block runs."""

    task: BlockTask
    pages_N: Tensor


class SlotTable:
    """The state of every slot as device tensors; the stream of the device is their only reader and writer.

    Masked means a position of the block that is not fixed yet, whatever id stands there or anywhere else.
    """

    def __init__(self, sizes: SlotSizes) -> None:
        num_slots, device = sizes.num_slots, sizes.device
        max_pages = -(-sizes.max_canvas // sizes.page_size)
        self.sizes = sizes
        self.attached: list[Attached | None] = [None] * num_slots
        self.canvas_SC = torch.zeros(num_slots, sizes.max_canvas, dtype=torch.int64, device=device)
        self.pages_SN = torch.zeros(num_slots, max_pages, dtype=torch.int64, device=device)
        self.masked_SL = torch.zeros(num_slots, sizes.block_length, dtype=torch.bool, device=device)
        self.done_S = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.ignore_eos_S = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.block_start_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.step_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seed_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.temperature_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.parameter_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.rule_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.length_S = torch.ones(num_slots, dtype=torch.int64, device=device)

    def fill(self, slot: int, task: BlockTask, pages: tuple[int, ...]) -> None:
        """Give a free slot to a block: prompt as it is, masks after it, step 0."""
        sizes = self.sizes
        assert self.attached[slot] is None, f"slot {slot} is taken"
        assert task.block_length == sizes.block_length, f"block of {task.block_length}, not {sizes.block_length}"
        assert task.canvas_length <= min(sizes.max_canvas, len(pages) * sizes.page_size), "canvas beyond its pages"
        pages_N = torch.tensor(pages, dtype=torch.int64, device=sizes.device)
        self.attached[slot] = Attached(task, pages_N)
        self.canvas_SC[slot].fill_(sizes.mask_token_id)
        self.canvas_SC[slot, : task.block_start] = torch.tensor(task.token_ids, dtype=torch.int64)
        self.pages_SN[slot, : len(pages)] = pages_N
        self.masked_SL[slot] = True
        self.done_S[slot] = False
        self.ignore_eos_S[slot] = task.ignore_eos
        self.block_start_S[slot] = task.block_start
        self.step_S[slot] = 0
        self.seed_S[slot] = task.request_seed
        parameter = task.sampling.parameter
        self.temperature_S[slot] = task.sampling.temperature
        self.parameter_S[slot] = 0.0 if parameter is None else parameter
        self.rule_S[slot] = RULE_CODES[task.sampling.unmasking_strategy]
        self.length_S[slot] = task.canvas_length

    def resume(self, slot: int, fixed: Mapping[int, int]) -> None:
        """What a refresh elsewhere has fixed in a slot's block, canvas position -> token id: step 0 is behind it."""
        positions, token_ids = self._numbers([*fixed]), self._numbers([*fixed.values()])
        self.canvas_SC[slot, positions] = token_ids.to(self.canvas_SC.dtype)
        self.masked_SL[slot, positions - self.block_start_S[slot]] = False
        self.step_S[slot] = 1

    def _numbers(self, values: list[int]) -> Tensor:
        """On the device; the host does not wait for it."""
        is_cuda = self.sizes.device.type == "cuda"
        return torch.tensor(values, dtype=torch.int64, pin_memory=is_cuda).to(self.sizes.device, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Take the slot back; spans of it that follow are void."""
        self.attached[slot] = None
        self.done_S[slot] = True

    def land(self, slots_B: Tensor, chosen_BL: Tensor, token_BL: Tensor, eos_ids: Tensor) -> None:
        """Fix the chosen positions of a step, count the step, and note which blocks have ended.

        A block ends when nothing in it is masked, or, unless the end of text is ignored, when nothing is masked
        before its first end-of-text id.
        """
        length = self.sizes.block_length
        offset_L = torch.arange(length, device=slots_B.device)
        block_BL = self.block_start_S[slots_B].unsqueeze(1) + offset_L
        slot_B1 = slots_B.unsqueeze(1)
        ids_BL = torch.where(chosen_BL, token_BL, self.canvas_SC[slot_B1, block_BL])
        masked_BL = self.masked_SL[slots_B] & ~chosen_BL
        is_eos_BL = torch.isin(ids_BL, eos_ids) & ~masked_BL
        first_masked_B = torch.where(masked_BL, offset_L, length).amin(dim=1)
        first_eos_B = torch.where(is_eos_BL, offset_L, length).amin(dim=1)
        has_ended_B = (first_eos_B < first_masked_B) & ~self.ignore_eos_S[slots_B]
        self.canvas_SC[slot_B1, block_BL] = ids_BL
        self.masked_SL[slots_B] = masked_BL
        self.done_S[slots_B] = has_ended_B | (first_masked_B == length)
        self.step_S[slots_B] += 1

    def task(self, slot: int) -> BlockTask:
        attached = self.attached[slot]
        assert attached is not None, f"slot {slot} is free"
        return attached.task

    def sequence(self, slot: int, num_rows: int) -> SequenceLayout:
        """How `num_rows` query rows of the slot attend: to its whole canvas."""
        attached = self.attached[slot]
        assert attached is not None, f"slot {slot} is free"
        task = attached.task
        num_pages = -(-task.canvas_length // self.sizes.page_size)
        return SequenceLayout(num_rows, attached.pages_N[:num_pages], task.canvas_length)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a launch, spans one after another."""

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    """Place of each row's K and V in the pool; -1: not written."""
    layout: AttentionLayout
    output_rows_R: Tensor
    """Indices into T."""
    output_layout: AttentionLayout
    slots_B: Tensor
    masked_BL: Tensor
    span_R: Tensor
    """Index into B of each output row."""
    offset_R: Tensor
    """Index into L of the position that each output row predicts."""
    position_R: Tensor
    """That canvas position."""


def pack(table: SlotTable, spans: Sequence[Span], logit_shift: int) -> PackedBatch:
    """Lay out spans of running blocks; waits for the device, which knows what is still masked.

    With a logit shift the prediction for position i is read at row i - shift (position 0 keeps its own row), so a
    decode span starts that much left of its block; those rows are queries only (`Span.written_from`).
    """
    device, page_size = table.sizes.device, table.sizes.page_size
    num_rows_B = np.array([span.num_rows for span in spans])
    first_B = np.array([span.start for span in spans])
    end_B = np.cumsum(num_rows_B)
    row_of_zero_B = end_B - num_rows_B - first_B  # the packed row that canvas position 0 has or would have
    span_T = np.repeat(np.arange(len(spans)), num_rows_B)
    positions_T = np.arange(end_B[-1]) - row_of_zero_B[span_T]
    slots_B = torch.tensor([span.slot for span in spans], dtype=torch.int64, device=device)
    place_T = torch.from_numpy(positions_T).to(device)
    slot_T = slots_B[torch.from_numpy(span_T).to(device)]
    kv_slots_T = table.pages_SN[slot_T, place_T // page_size] * page_size + place_T % page_size
    if logit_shift:
        assert all(span.start == 0 or span.written_from > span.start for span in spans), "a span writes a query's K, V"
        written_from_B = np.array([span.written_from for span in spans])
        kv_slots_T[torch.from_numpy(positions_T < written_from_B[span_T]).to(device)] = -1

    masked_BL = table.masked_SL[slots_B]
    span_R, offset_R = masked_BL.nonzero(as_tuple=True)
    position_R = table.block_start_S[slots_B][span_R] + offset_R
    source_R = (position_R - logit_shift).clamp_(min=0) if logit_shift else position_R
    output_rows_R = torch.from_numpy(row_of_zero_B).to(device)[span_R] + source_R
    num_output_rows = masked_BL.sum(dim=1).tolist()
    return PackedBatch(
        token_ids_T=table.canvas_SC[slot_T, place_T],
        positions_T=place_T,
        kv_slots_T=kv_slots_T,
        layout=tuple(table.sequence(span.slot, span.num_rows) for span in spans),
        output_rows_R=output_rows_R,
        output_layout=tuple(table.sequence(s.slot, n) for s, n in zip(spans, num_output_rows, strict=True)),
        slots_B=slots_B,
        masked_BL=masked_BL,
        span_R=span_R,
        offset_R=offset_R,
        position_R=position_R,
    )
