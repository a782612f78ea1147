"""The Runner that computes on a CUDA device and never makes it wait for the host.

Everything of a launch is queued on the device's stream: the table of its spans, the forward pass (a captured graph
for a batch of decode steps), the logits of the rows that are still masked, the unmasking, and one copy of what came
of it, which `collect` reads while the next launch runs. Ids, masks and done flags live on the device.

Shapes: B spans, L block length, S slots, R rows whose logits are computed, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from numpy.typing import NDArray

from dbench.serve.batch import SlotTable
from dbench.serve.cuda_batch import NOTHING_WRITTEN, BatchShape, Layout, PassSizes, largest_shape, lay_out
from dbench.serve.cuda_model import CudaModel, DeviceBatch
from dbench.serve.device_clock import DeviceClock, device_lost_if_it_fails
from dbench.serve.graphs import DecodeGraphs, StretchGraphs, host_seconds
from dbench.serve.kernels.layout import (
    SpanTable,
    attach_slot,
    attachment,
    compact_masked,
    pack_rows,
    row_buffers,
)
from dbench.serve.kernels.sampling import RECORD_EXTRA, MaskedRows, ProposalBuffers, propose, unmask
from dbench.serve.kv import KvPool
from dbench.serve.op_marks import NO_MARKS, LayerMarks, Marks, watched
from dbench.serve.refresh_attention import RefreshAttention
from dbench.serve.runner import LayerWatcher, Phase, Span, SpanResult, StepResult, Ticket
from dbench.serve.sequence import BlockTask
from dbench.serve.weights import Weights

MAX_LOGIT_ROWS = 2048
"""Rows of logits at a time: 518 MB for a vocabulary of 126,464 in bfloat16."""
LOGIT_ROWS_STEP = 64
"""Rows of logits are computed in multiples of this, for which matrix products are fast."""
NUM_IN_FLIGHT = 3
"""Staging buffers: one more than the launches that are under way at a time."""
OPERATION_SAMPLE_STEPS = 16
"""One launch in so many is measured by operation."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodingFacts:
    """What a step needs to know of the model."""

    d_model: int
    n_layers: int
    vocab_size: int
    logit_shift: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class SlotProgress:
    """What the host knows of a slot."""

    task: BlockTask
    masks_left: int
    in_flight: int = 0

    @property
    def most_masked(self) -> int:
        """Masked rows at the next launch, at most: those left, less the fewest that each launch in flight fixes."""
        return max(0, self.masks_left - self.in_flight * self.task.sampling.fewest_per_step)


class Staging:
    """Pinned memory and events of one launch under way."""

    def __init__(self, num_spans: int, block_length: int) -> None:
        self.table = torch.zeros(4, num_spans + 1, dtype=torch.int32, pin_memory=True)
        self.record = torch.zeros(num_spans, block_length + RECORD_EXTRA, dtype=torch.int32, pin_memory=True)
        self.started, self.passed, self.completed = (torch.cuda.Event(enable_timing=True) for _ in range(3))


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that has not been collected."""

    spans: tuple[Span, ...]
    layout: Layout
    num_logit_rows: int
    staging: Staging
    launched_s: float
    marks: LayerMarks | None


class LogitRoom:
    """Logits of the rows that are still masked, and what is made of them."""

    def __init__(self, facts: DecodingFacts, sizes: PassSizes, dtype: torch.dtype, device: torch.device) -> None:
        most_rows = sizes.num_spans * sizes.block_length
        rows = min(most_rows, MAX_LOGIT_ROWS)
        self.places_R = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.picked_RE = torch.empty(rows, facts.d_model, dtype=dtype, device=device)
        self.logits_RV = torch.empty(rows, facts.vocab_size, dtype=dtype, device=device)
        self.proposals = ProposalBuffers(rows, sizes.num_spans, sizes.block_length, device)
        self.record_BX = torch.zeros(
            sizes.num_spans, sizes.block_length + RECORD_EXTRA, dtype=torch.int32, device=device
        )


class CudaRunner:
    """Slots, pages and a model on one CUDA device. One thread calls everything."""

    def __init__(
        self,
        model: CudaModel,
        refresh: RefreshAttention,
        slots: SlotTable,
        room: LogitRoom,
        sizes: PassSizes,
        facts: DecodingFacts,
    ) -> None:
        """`slots` has one slot more than the engine: its last one is that of padding spans."""
        device = slots.sizes.device
        self._model, self._refresh, self._table, self._room = model, refresh, slots, room
        self._sizes, self._facts, self._device = sizes, facts, device
        self._kv: KvPool | None = None
        self._pad_slot = slots.sizes.num_slots - 1
        slots.block_start_S[self._pad_slot] = facts.logit_shift
        self._eos_ids = torch.tensor(facts.eos_token_ids, dtype=torch.int32, device=device)
        self._spans = torch.zeros(4, sizes.num_spans + 1, dtype=torch.int32, device=device)
        self._rows = row_buffers(sizes.num_rows, sizes.num_spans, sizes.block_length, device)
        self._staging = [Staging(sizes.num_spans, sizes.block_length) for _ in range(NUM_IN_FLIGHT)]
        self._graphs = DecodeGraphs(sizes.short_rows)
        self._marked_graphs = DecodeGraphs(sizes.short_rows)
        self._stretches = StretchGraphs()
        self._launch_s = 0.0
        self._graph_marks: dict[int, LayerMarks] = {}
        self._measured_layer: int | None = None
        self._clock = DeviceClock()
        self._slots: dict[int, SlotProgress] = {}
        self._launched: dict[Ticket, Launched] = {}
        self._tickets = count()
        self._watcher: LayerWatcher | None = None

    @property
    def num_pages(self) -> int:
        """KV pages for canvases."""
        return self.kv.num_pages

    @property
    def weights(self) -> Weights:
        """Those of the model."""
        return self._model.weights

    # ---- before work comes ---------------------------------------------------------------------------

    def take_pages(self, kv: KvPool) -> None:
        """Use these pages; once, before anything else."""
        self._kv = kv

    @torch.inference_mode()
    def run_largest(self) -> None:
        """The largest pass there can be, over rows of nobody: whatever it takes is taken now."""
        sizes = self._sizes
        shape = largest_shape(
            sizes.num_rows, sizes.num_spans, short_rows=sizes.short_rows, longest_canvas=sizes.longest_canvas
        )
        self._upload_padding(shape.num_short, shape.long_lengths)
        self._refresh.plan(shape.long_lengths)
        self._pass(shape, sizes.longest_canvas)
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def compile(self) -> None:
        """Decode passes that compile every kernel which one without a graph may need."""
        for num_spans in self._model.counts_to_compile:
            self._padded_pass(num_spans)

    @torch.inference_mode()
    def capture(self, graph_sizes: Sequence[int]) -> None:
        """Capture decode passes of these numbers of spans, and the stretches of passes of few rows."""
        self._rows.places_T.fill_(self.kv.last_place)
        launch_s = host_seconds(partial(self._padded_pass, 1))
        self._stretches.capture(self._sizes.num_rows, self._model.num_stretches, self._run_stretch, launch_s)
        self._launch_s = host_seconds(partial(self._padded_pass, 1, stretched=True))
        self._graphs.capture(graph_sizes, self._padded_pass)
        logger.info(
            "a pass without graphs takes the host %.1f ms, in stretches %.1f ms", launch_s * 1e3, self._launch_s * 1e3
        )

    @torch.inference_mode()
    def measure_operations(self, layer: int, graph_sizes: Sequence[int]) -> None:
        """From now on measure one launch in OPERATION_SAMPLE_STEPS by the operations of `layer`."""
        self._measured_layer = layer
        for size in graph_sizes:
            marks = self._graph_marks[size] = LayerMarks(layer, self._facts.n_layers, in_graph=True)
            self._marked_graphs.capture([size], partial(self._padded_pass, marks=marks))

    def _padded_pass(self, num_spans: int, marks: Marks = NO_MARKS, *, stretched: bool = False) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._upload_padding(num_spans, ())
        shape = BatchShape(num_spans, self._sizes.short_rows, ())
        self._pass(
            shape, self._sizes.short_rows, marks, self._stretches.rows_for(shape.num_rows) if stretched else None
        )

    def _run_stretch(self, number: int, num_rows: int) -> None:
        self._model.run_stretch(number, self._model.views(num_rows), self._batch())

    def _upload_padding(self, num_short: int, long_lengths: tuple[int, ...]) -> None:
        spans = [Span(self._pad_slot, Phase.REFRESH, 0, rows, NOTHING_WRITTEN) for rows in long_lengths]
        short = [Span(self._pad_slot, Phase.DECODE, 0, self._sizes.short_rows, NOTHING_WRITTEN)] * num_short
        layout = lay_out([*short, *spans], self._sizes.short_rows, num_padded=0, pad_slot=self._pad_slot)
        self._spans[:, : layout.table.shape[1]] = torch.from_numpy(layout.table).to(self._device)

    # ---- the Runner ----------------------------------------------------------------------------------

    @property
    def kv(self) -> KvPool:
        assert self._kv is not None, "no pages yet"
        return self._kv

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        assert slot not in self._slots, f"slot {slot} is taken"
        assert task.block_length == self._sizes.block_length, f"block of {task.block_length}"
        assert task.canvas_length <= len(pages) * self._sizes.page_size, "canvas beyond its pages"
        with device_lost_if_it_fails(self._device):
            message = torch.tensor(attachment(task, pages), dtype=torch.int64, pin_memory=True)
            attach_slot(slot, message.to(self._device, non_blocking=True), self._table)
            if fixed is not None:
                self._table.resume(slot, fixed)
        self._slots[slot] = SlotProgress(task, task.block_length - len(fixed or ()))

    def watch_layers(self, watcher: LayerWatcher) -> None:
        self._watcher = watcher

    def detach(self, slot: int) -> None:
        del self._slots[slot]

    @torch.inference_mode()
    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        launched_s = time.monotonic()
        ticket = Ticket(next(self._tickets))
        staging = self._staging[ticket % NUM_IN_FLIGHT]
        self._clock.forget(staging.completed)
        num_logit_rows = sum(self._slots[span.slot].most_masked for span in spans)
        is_measured = self._measured_layer is not None and ticket % OPERATION_SAMPLE_STEPS == 0
        with device_lost_if_it_fails(self._device):
            layout, marks = self._queue(spans, staging, num_logit_rows, is_measured=is_measured)
        for span in spans:
            self._slots[span.slot].in_flight += 1
        self._launched[ticket] = Launched(spans, layout, num_logit_rows, staging, launched_s, marks)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        launched = self._launched.pop(ticket)
        staging = launched.staging
        with device_lost_if_it_fails(self._device):
            completed_s = self._clock.wait(staging.completed)
        return StepResult(
            spans=self._results(launched),
            launched_s=launched.launched_s,
            completed_s=completed_s,
            sampling_s=staging.passed.elapsed_time(staging.completed) / 1e3,
            device_s=staging.started.elapsed_time(staging.completed) / 1e3,
            operations=launched.marks.seconds() if launched.marks else None,
        )

    def close(self) -> None:
        with device_lost_if_it_fails(self._device):
            torch.cuda.synchronize(self._device)

    # ---- queueing a launch; nothing here waits for the device -----------------------------------------

    def _queue(
        self, spans: tuple[Span, ...], staging: Staging, num_logit_rows: int, *, is_measured: bool
    ) -> tuple[Layout, LayerMarks | None]:
        sizes = self._sizes
        is_decode = self._watcher is None and all(span.num_rows == sizes.short_rows for span in spans)
        size = self._graphs.size_for(len(spans), self._launch_s) if is_decode else None
        layout = lay_out(spans, sizes.short_rows, num_padded=size or 0, pad_slot=self._pad_slot)
        num_spans = layout.shape.num_spans
        staging.table[:, : num_spans + 1] = torch.from_numpy(layout.table)
        self._spans.copy_(staging.table, non_blocking=True)
        staging.started.record()
        marks = None
        if size is None:
            if is_measured and self._measured_layer is not None:
                marks = LayerMarks(self._measured_layer, self._facts.n_layers, in_graph=False)
            if layout.shape.long_lengths:
                self._refresh.plan(layout.shape.long_lengths)
            told = watched(marks or NO_MARKS, self._watcher, spans)
            stretches = self._stretches.rows_for(layout.shape.num_rows) if told is NO_MARKS else None
            self._pass(layout.shape, layout.longest_span, told, stretches)
        elif is_measured and size in self._graph_marks:
            marks = self._graph_marks[size]
            self._marked_graphs.replay(size)
        else:
            self._graphs.replay(size)
        staging.passed.record()
        self._sample(num_spans, num_logit_rows)
        staging.record[:num_spans].copy_(self._room.record_BX[:num_spans], non_blocking=True)
        staging.completed.record()
        return layout, marks

    def _pass(
        self, shape: BatchShape, longest_span: int, marks: Marks = NO_MARKS, stretches: int | None = None
    ) -> None:
        """`stretches`: the number of rows whose captured stretches to use."""
        last_place = self.kv.last_place
        pack_rows(
            SpanTable(self._spans[:, : shape.num_spans + 1]),
            self._table,
            self._rows,
            longest_span=longest_span,
            logit_shift=self._facts.logit_shift,
            last_place=last_place,
        )
        stretch = None
        if stretches is not None:
            self._rows.places_T[shape.num_rows : stretches].fill_(last_place)
            stretch = partial(self._stretches.replay, num_rows=stretches)
        self._model.forward(shape, self._batch(), marks, stretch)

    def _batch(self) -> DeviceBatch:
        return DeviceBatch(self._rows, self._spans[1], self._table, self.kv)

    def _sample(self, num_spans: int, num_logit_rows: int) -> None:
        """Propose for the masked rows of the launch, and apply its rules."""
        room, slots_B = self._room, self._spans[1, :num_spans]
        most = num_spans * self._sizes.block_length
        num_rows = min(-(-max(1, num_logit_rows) // LOGIT_ROWS_STEP) * LOGIT_ROWS_STEP, most)
        rows = MaskedRows(room.places_R[:num_rows], room.count)
        compact_masked(slots_B, self._table.masked_SL, self._table.done_S, rows.place_R, rows.count)
        hidden_RE = self._model.hidden(most)
        for first in range(0, num_rows, len(room.logits_RV)):
            places_R = rows.place_R[first : first + len(room.logits_RV)]
            picked_RE, logits_RV = room.picked_RE[: len(places_R)], room.logits_RV[: len(places_R)]
            torch.index_select(hidden_RE, 0, places_R, out=picked_RE)
            self._model.logits(picked_RE, logits_RV)
            propose(logits_RV, first, rows, slots_B, self._table, room.proposals)
        unmask(slots_B, room.proposals, self._table, self._eos_ids, room.record_BX)

    # ---- reading a launch ----------------------------------------------------------------------------

    def _results(self, launched: Launched) -> tuple[SpanResult, ...]:
        length = self._sizes.block_length
        record_BX = launched.staging.record.numpy()
        results: list[SpanResult | None] = [None] * len(launched.spans)
        num_masked = 0
        for place, index in enumerate(launched.layout.order):
            progress = self._slots[launched.spans[index].slot]
            result = _result(launched.spans[index].slot, progress.task.block_start, record_BX[place], length)
            num_masked += 0 if result.void else progress.masks_left
            progress.in_flight -= 1
            progress.masks_left -= len(result.positions)
            results[index] = result
        assert num_masked <= launched.num_logit_rows, f"{num_masked} masked rows, logits of {launched.num_logit_rows}"
        return tuple(result for result in results if result is not None)


def _result(slot: int, block_start: int, record_X: NDArray[Any], length: int) -> SpanResult:
    """One row of the step record in words."""
    is_done, was_done, bad_position = record_X[length : length + RECORD_EXTRA].tolist()
    offsets = (record_X[:length] >= 0).nonzero()[0]
    return SpanResult(
        slot=slot,
        positions=tuple((offsets + block_start).tolist()),
        token_ids=tuple(record_X[offsets].tolist()),
        done=bool(is_done),
        void=bool(was_done),
        error=f"logits are not finite at canvas position {bad_position}" if bad_position >= 0 else "",
    )
