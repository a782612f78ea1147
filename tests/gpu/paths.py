"""The plain model and the CUDA model side by side: the same weights, slots and pages behind both."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dbench.serve.attention import ATTENTION_BACKENDS
from dbench.serve.batch import SlotSizes, SlotTable, pack
from dbench.serve.cuda_batch import BatchShape, PassSizes, lay_out
from dbench.serve.cuda_model import CudaModel, DeviceBatch
from dbench.serve.families import FAMILIES, ModelConfig
from dbench.serve.kernels.layout import (
    SpanTable,
    attach_slot,
    attachment,
    pack_rows,
    row_buffers,
)
from dbench.serve.kv import KvPool
from dbench.serve.model import Model
from dbench.serve.refresh_attention import REFRESH_BACKENDS
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import BlockKey, BlockTask, SamplingParameters
from dbench.serve.weights import Weights

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
NUM_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of blocks, pages and prompts; every canvas has two blocks of masks."""

    block: int
    page: int
    longest: int
    prompts: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return len(self.prompts) + 1

    @property
    def num_pages(self) -> int:
        return sum(-(-self.canvas(slot) // self.page) for slot in range(len(self.prompts))) + 3

    def canvas(self, slot: int) -> int:
        return self.prompts[slot] + 2 * self.block


@dataclass(slots=True)
class Path:
    """One way to compute: its slots and its pages."""

    slots: SlotTable
    kv: KvPool


class BothPaths:
    """Blocks of random prompts, attached to both."""

    def __init__(self, config: ModelConfig, weights: Weights, sizes: Sizes, backend: str = "sdpa") -> None:
        self.config, self.weights, self.sizes = config, weights, sizes
        self.shift = FAMILIES[config.family].logit_shift
        dtype, short_rows = weights.embedding_VE.dtype, sizes.block + self.shift
        self.pass_sizes = PassSizes(NUM_ROWS, sizes.num_slots, sizes.block, short_rows, sizes.longest, sizes.page)
        self.refresh = REFRESH_BACKENDS[backend](config, dtype, DEVICE)
        self.plain, self.fast = self._path(), self._path()
        self.fast.slots.block_start_S[-1] = self.shift  # the slot of padding
        self.model = Model(config, weights, ATTENTION_BACKENDS["sdpa"]())
        self.cuda_model = CudaModel(config, weights, self.refresh, self.pass_sizes)
        self.rows = row_buffers(NUM_ROWS, sizes.num_slots, sizes.block, DEVICE)
        pages = torch.randperm(sizes.num_pages, generator=torch.Generator().manual_seed(8)).tolist()
        for slot in range(len(sizes.prompts)):
            task = self._task(slot)
            own = tuple(pages.pop() for _ in range(-(-task.canvas_length // sizes.page)))
            self.plain.slots.fill(slot, task, own)
            attach_slot(slot, torch.tensor(attachment(task, own), device=DEVICE), self.fast.slots)

    def fix(self, slot: int, offset: int, token: int) -> None:
        for path in (self.plain, self.fast):
            start = int(path.slots.block_start_S[slot])
            path.slots.canvas_SC[slot, start + offset] = token
            path.slots.masked_SL[slot, offset] = False

    def refresh_span(self, slot: int) -> Span:
        return Span(slot, Phase.REFRESH, 0, self.sizes.canvas(slot))

    def decode_span(self, slot: int) -> Span:
        start = self.sizes.prompts[slot]
        return Span(slot, Phase.DECODE, start - self.shift, self.sizes.block + self.shift, start)

    def logits(self, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """Of the masked rows, in order, by the plain and by the CUDA model."""
        return self.plain_logits(spans), self.fast_logits(spans)

    @torch.inference_mode()
    def plain_logits(self, spans: list[Span]) -> Tensor:
        batch = pack(self.plain.slots, spans, self.shift)
        return self.model.logits(self.model.forward(batch, self.plain.kv))

    @torch.inference_mode()
    def fast_logits(self, spans: list[Span]) -> Tensor:
        layout = lay_out(spans, self.pass_sizes.short_rows, num_padded=0, pad_slot=self.sizes.num_slots - 1)
        table = torch.from_numpy(layout.table).to(DEVICE)
        self.refresh.plan(layout.shape.long_lengths)
        self.run_pass(layout.shape, table, layout.longest_span)
        wanted = [
            place * self.sizes.block + offset
            for place in range(len(spans))
            for offset in self.fast.slots.masked_SL[spans[place].slot].nonzero().flatten().tolist()
        ]
        hidden_RE = self.cuda_model.hidden(len(spans) * self.sizes.block)[torch.tensor(wanted, device=DEVICE)]
        logits_RV = torch.empty(len(wanted), self.config.vocab_size, dtype=hidden_RE.dtype, device=DEVICE)
        self.cuda_model.logits(hidden_RE.contiguous(), logits_RV)
        return logits_RV

    @torch.inference_mode()
    def run_pass(
        self, shape: BatchShape, table: Tensor, longest_span: int, stretch: Callable[[int], None] | None = None
    ) -> None:
        """Lay out and compute; `table` is that of the spans, on the device."""
        slots = self.fast.slots
        pack_rows(
            SpanTable(table),
            slots,
            self.rows,
            longest_span=longest_span,
            logit_shift=self.shift,
            last_place=self.fast.kv.last_place,
        )
        self.cuda_model.forward(shape, self.batch(table), stretch=stretch)

    def batch(self, table: Tensor) -> DeviceBatch:
        return DeviceBatch(self.rows, table[1], self.fast.slots, self.fast.kv)

    def _path(self) -> Path:
        sizes, mask_token_id = self.sizes, self.config.mask_token_id
        assert mask_token_id is not None
        return Path(
            SlotTable(SlotSizes(sizes.num_slots, sizes.longest, sizes.block, sizes.page, mask_token_id, DEVICE)),
            KvPool(self.config, num_pages=sizes.num_pages, page_size=sizes.page, like=self.weights.embedding_VE),
        )

    def _task(self, number: int) -> BlockTask:
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(0, self.config.vocab_size, (self.sizes.prompts[number],), generator=generator)
        block = self.sizes.block
        sampling = SamplingParameters("conf_threshold", confidence_threshold=0.9)
        return BlockTask(BlockKey("r", number, 0), tuple(prompt.tolist()), 2 * block, block, sampling, 1, True, 0.0, 2)
