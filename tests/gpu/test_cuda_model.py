"""The CUDA forward pass computes what the plain one computes, from pages and among packed rows alike.

Also runs in Triton's interpreter, without a GPU: TRITON_INTERPRET=1 pytest tests/gpu/test_cuda_model.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dbench.models import size_directory
from dbench.serve.attention import ATTENTION_BACKENDS
from dbench.serve.batch import SlotSizes, SlotTable, pack
from dbench.serve.cuda_batch import lay_out
from dbench.serve.cuda_model import CudaModel, DeviceBatch, PassSizes
from dbench.serve.families import FAMILIES, ModelConfig, read_model_config
from dbench.serve.kernels.layout import (
    SlotPlaces,
    SpanTable,
    attach_slot,
    attachment,
    pack_rows,
    row_buffers,
)
from dbench.serve.kv import KvPool
from dbench.serve.model import Model
from dbench.serve.refresh_attention import SdpaRagged
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import BlockKey, BlockTask, SamplingParameters
from dbench.serve.weights import Weights, WeightSource, load_weights

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
BLOCK, PAGE, LONGEST, SLOTS, PAGES = 8, 4, 64, 5, 70
PROMPTS = (3, 17, 30, 41)


@dataclass(slots=True)
class Path:
    """One way to compute: its slots and its pages."""

    slots: SlotTable
    kv: KvPool


def slot_table(mask_token_id: int) -> SlotTable:
    return SlotTable(SlotSizes(SLOTS, LONGEST, BLOCK, PAGE, mask_token_id, DEVICE))


def task_of(number: int, vocabulary: int) -> BlockTask:
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(0, vocabulary, (PROMPTS[number],), generator=generator).tolist()
    return BlockTask(
        BlockKey("r", number, 0), tuple(prompt), 2 * BLOCK, BLOCK, SamplingParameters("conf_threshold"), 1, True, 0.0, 2
    )


class BothPaths:
    """The same weights, slots and pages behind the plain model and the CUDA model."""

    def __init__(self, name: str) -> None:
        self.config: ModelConfig = read_model_config(size_directory(name))
        self.shift = FAMILIES[self.config.family].logit_shift
        source = WeightSource(size_directory(name), "random", torch.float32, DEVICE, 3)
        self.weights: Weights = load_weights(self.config, source)
        for layer in self.weights.layers:
            if layer.qkv_bias_F is not None:
                layer.qkv_bias_F.normal_(0, 0.5)
        sizes = PassSizes(400, SLOTS - 1, BLOCK, BLOCK + self.shift, LONGEST, PAGE)
        self.sizes, self.refresh = sizes, SdpaRagged(self.config, torch.float32, DEVICE)
        assert self.config.mask_token_id is not None
        self.plain, self.fast = (
            Path(
                slot_table(self.config.mask_token_id),
                KvPool(self.config, num_pages=PAGES, page_size=PAGE, like=self.weights.embedding_VE),
            )
            for _ in range(2)
        )
        self.model = Model(self.config, self.weights, ATTENTION_BACKENDS["sdpa"]())
        self.cuda_model = CudaModel(self.config, self.weights, self.refresh, sizes)
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(8)).tolist()
        for slot in range(len(PROMPTS)):
            task = task_of(slot, self.config.vocab_size)
            own = tuple(pages.pop() for _ in range(-(-task.canvas_length // PAGE)))
            self.plain.slots.fill(slot, task, own)
            attach_slot(slot, torch.tensor(attachment(task, own), device=DEVICE), self.fast.slots)

    def fix(self, slot: int, offset: int, token: int) -> None:
        for path in (self.plain, self.fast):
            start = int(path.slots.block_start_S[slot])
            path.slots.canvas_SC[slot, start + offset] = token
            path.slots.masked_SL[slot, offset] = False

    @torch.inference_mode()
    def logits(self, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """Of the masked rows, in order, by the plain and by the CUDA model."""
        batch = pack(self.plain.slots, spans, self.shift)
        plain_RV = self.model.logits(self.model.forward(batch, self.plain.kv))
        slots = self.fast.slots
        layout = lay_out(spans, self.sizes.short_rows, num_padded=0, pad_slot=SLOTS - 1)
        table = torch.from_numpy(layout.table).to(DEVICE)
        rows = row_buffers(400, SLOTS, BLOCK, DEVICE)
        pack_rows(
            SpanTable(table),
            SlotPlaces(slots.canvas_SC, slots.pages_SN, slots.block_start_S),
            rows,
            longest_span=layout.longest_span,
            page_size=PAGE,
            logit_shift=self.shift,
            last_place=self.fast.kv.last_place,
        )
        self.refresh.plan(layout.shape.long_lengths)
        self.cuda_model.forward(layout.shape, DeviceBatch(rows, table[1], slots.pages_SN, slots.length_S, self.fast.kv))
        hidden_RE = self.cuda_model.hidden(len(spans) * BLOCK)
        wanted = (batch.span_R * BLOCK + batch.offset_R).to(DEVICE)
        fast_RV = torch.empty(len(wanted), self.config.vocab_size, device=DEVICE)
        self.cuda_model.logits(hidden_RE[wanted].contiguous(), fast_RV)
        return plain_RV, fast_RV

    def refresh_span(self, slot: int) -> Span:
        return Span(slot, Phase.REFRESH, 0, PROMPTS[slot] + 2 * BLOCK)

    def decode_span(self, slot: int) -> Span:
        start = PROMPTS[slot]
        return Span(slot, Phase.DECODE, start - self.shift, BLOCK + self.shift, start)


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_refreshes_decodes_and_mixed_batches_give_the_logits_and_pages_of_the_plain_model(name: str) -> None:
    both = BothPaths(name)
    torch.testing.assert_close(*both.logits([both.refresh_span(0), both.refresh_span(2)]), rtol=1e-4, atol=1e-4)
    both.fix(0, 3, 5)
    both.fix(2, 0, 9)
    mixed = [both.decode_span(2), both.decode_span(0), both.refresh_span(3), both.refresh_span(1)]
    torch.testing.assert_close(*both.logits(mixed), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*both.logits([both.decode_span(slot) for slot in (1, 3, 0, 2)]), rtol=1e-4, atol=1e-4)
    for number in range(both.config.n_layers):
        plain, fast = both.plain.kv.layer(number)[:, :-1], both.fast.kv.layer(number)[:, :-1]
        torch.testing.assert_close(plain, fast, rtol=1e-4, atol=1e-4)
