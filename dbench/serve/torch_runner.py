"""The Runner that computes with torch.

One thread is the device's stream: attach, launch and detach queue work on it in call order and return at once;
only that thread touches slots and pages, so what it finds at a span's turn is what the spans before it left.

Shapes: B spans, T packed rows, R masked rows of their blocks, V vocabulary, L block length, E d_model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from dbench.errors import ModelError, OptionError, unknown_name
from dbench.serve.attention import ATTENTION_BACKENDS
from dbench.serve.batch import PackedBatch, SlotSizes, SlotTable, pack
from dbench.serve.families import FAMILIES, ModelConfig, read_model_config
from dbench.serve.kv import KvPool
from dbench.serve.model import Model
from dbench.serve.noise import DrawKeys
from dbench.serve.runner import LayerWatcher, Phase, Span, SpanResult, StepResult, Ticket
from dbench.serve.sequence import BlockTask
from dbench.serve.unmask import MEASURES, Candidates, Proposals, RowWishes, choose, join, propose
from dbench.serve.weights import WeightSource, load_weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_LOGITS = 1 << 24
"""Logits computed at a time: 64 MB in float32, however many rows a batch has."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything that a runner is built from, resolved."""

    model_dir: Path
    load_format: str
    dtype: str
    device: str
    seed: int
    num_pages: int | None
    """None, on CUDA only: as many as fit."""
    page_size: int
    num_slots: int
    block_length: int
    mask_token_id: int
    num_threads: int


def build_runner(config: RunnerConfig) -> TorchRunner:
    """Read the model and reserve its slots and pages; raises ModelError or OptionError for what cannot be used."""
    if config.dtype not in DTYPES:
        raise ModelError(unknown_name("dtype", config.dtype, DTYPES))
    model_config = read_model_config(config.model_dir)
    if not 0 <= config.mask_token_id < model_config.vocab_size:
        raise ModelError(
            f"mask id {config.mask_token_id} is outside the vocabulary of {model_config.vocab_size} in "
            f"{config.model_dir}; give one with --mask-id"
        )
    assert config.num_pages is not None, "the number of pages is known on CPUs"
    max_canvas = min(model_config.max_sequence_length, config.num_pages * config.page_size)
    if max_canvas <= config.block_length:
        raise OptionError(
            f"a block of {config.block_length} and one token of prompt do not fit into {max_canvas} tokens "
            f"({config.num_pages} pages of {config.page_size}, context {model_config.max_sequence_length}); "
            "raise --kv-max-pages or lower --block-length"
        )
    torch.set_num_threads(config.num_threads)
    device = torch.device(config.device)
    source = WeightSource(config.model_dir, config.load_format, DTYPES[config.dtype], device, config.seed)
    weights = load_weights(model_config, source)
    sizes = SlotSizes(
        num_slots=config.num_slots,
        max_canvas=max_canvas,
        block_length=config.block_length,
        page_size=config.page_size,
        mask_token_id=config.mask_token_id,
        device=device,
    )
    kv = KvPool(model_config, num_pages=config.num_pages, page_size=config.page_size, like=weights.embedding_VE)
    model = Model(model_config, weights, ATTENTION_BACKENDS["sdpa"]())
    return TorchRunner(model_config, model, kv, SlotTable(sizes), config.num_threads)


class TorchRunner:
    """Slots, pages and a model on one device."""

    def __init__(self, model_config: ModelConfig, model: Model, kv: KvPool, slots: SlotTable, num_threads: int) -> None:
        self._vocab_size = model_config.vocab_size
        self._model = model
        self._kv = kv
        self._slots = slots
        self._eos_ids = torch.tensor(model_config.eos_token_ids, device=slots.sizes.device)
        self._logit_shift = FAMILIES[model_config.family].logit_shift
        self._stream = ThreadPoolExecutor(
            1, "device-stream", initializer=torch.set_num_threads, initargs=(num_threads,)
        )
        self._changes: list[Future[None]] = []
        self._launched: dict[Ticket, Future[StepResult]] = {}
        self._tickets = count()
        self._watcher: LayerWatcher | None = None

    @property
    def kv(self) -> KvPool:
        return self._kv

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        self._changes.append(self._stream.submit(self._slots.fill, slot, task, pages))
        if fixed is not None:
            self._changes.append(self._stream.submit(self._slots.resume, slot, fixed))

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        changes, self._changes = self._changes, []
        self._launched[ticket] = self._stream.submit(self._run, spans, changes, time.monotonic())
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        return self._launched.pop(ticket).result()

    def detach(self, slot: int) -> None:
        self._changes.append(self._stream.submit(self._slots.clear, slot))

    def watch_layers(self, watcher: LayerWatcher) -> None:
        self._watcher = watcher

    def close(self) -> None:
        self._stream.shutdown(wait=True, cancel_futures=True)

    # What follows runs in the stream's thread.

    @torch.inference_mode()
    def _run(self, spans: tuple[Span, ...], changes: list[Future[None]], launched_s: float) -> StepResult:
        for change in changes:
            change.result()  # all have run; one that failed fails the batch that counts on it
        done = self._slots.done_S.tolist()
        live = [span for span in spans if not done[span.slot]]
        results: dict[int, SpanResult] = {}
        sampling_s = 0.0
        if live:
            batch = pack(self._slots, live, self._logit_shift)
            hidden_RE = self._forward(batch, live)
            proposals, sampling_s = self._propose(batch, hidden_RE)
            started_s = time.monotonic()
            results = {result.slot: result for result in self._unmask(batch, proposals)}
            sampling_s += time.monotonic() - started_s
        return StepResult(
            spans=tuple(results.get(span.slot) or _void(span.slot) for span in spans),
            launched_s=launched_s,
            completed_s=time.monotonic(),
            sampling_s=sampling_s,
        )

    def _forward(self, batch: PackedBatch, live: list[Span]) -> Tensor:
        watcher, refreshed = self._watcher, tuple(span.slot for span in live if span.phase is Phase.REFRESH)
        if watcher is None or not refreshed:
            return self._model.forward(batch, self._kv)
        return self._model.forward(
            batch, self._kv, lambda layer: watcher.layer_written(refreshed, layer, _nothing_to_wait_for)
        )

    def _propose(self, batch: PackedBatch, hidden_RE: Tensor) -> tuple[Proposals, float]:
        """Proposals of all output rows, and the seconds they took without the LM head."""
        wishes = self._wishes(batch)
        rows_at_a_time = max(1, MAX_LOGITS // self._vocab_size)
        parts, sampling_s = [], 0.0
        for first in range(0, len(hidden_RE), rows_at_a_time):
            rows = slice(first, first + rows_at_a_time)
            logits_RV = self._model.logits(hidden_RE[rows])
            started_s = time.monotonic()
            parts.append(propose(logits_RV, self._slots.sizes.mask_token_id, wishes.rows(rows)))
            sampling_s += time.monotonic() - started_s
        return join(parts), sampling_s

    def _wishes(self, batch: PackedBatch) -> RowWishes:
        """What the requests ask for; scores that cost extra are computed only in a batch with a rule for them."""
        slots, slot_R = self._slots, batch.slots_B[batch.span_R]
        is_hot = bool(slots.temperature_S[batch.slots_B].any())
        measures = [slots.task(slot).sampling.rule.measure for slot in batch.slots_B.tolist()]
        return RowWishes(
            keys=DrawKeys(slots.seed_S[slot_R], batch.position_R, slots.step_S[slot_R]),
            temperature_R=slots.temperature_S[slot_R] if is_hot else None,
            measured_by={
                measure: torch.tensor([own is measure for own in measures], device=slot_R.device)[batch.span_R]
                for measure in MEASURES
                if measure in measures
            },
        )

    def _unmask(self, batch: PackedBatch, proposals: Proposals) -> list[SpanResult]:
        """Choose positions, fix their tokens, and say what each live span did."""
        slots, slots_B = self._slots, batch.slots_B
        slot_numbers = slots_B.tolist()
        score_BL = torch.full(batch.masked_BL.shape, -torch.inf, device=slots_B.device)
        score_BL[batch.span_R, batch.offset_R] = proposals.score_R
        token_BL = torch.zeros_like(batch.masked_BL, dtype=torch.int64)
        token_BL[batch.span_R, batch.offset_R] = proposals.token_R
        candidates = Candidates(
            masked_BL=batch.masked_BL,
            score_BL=score_BL,
            parameter_B=slots.parameter_S[slots_B],
            seed_B=slots.seed_S[slots_B],
            block_start_B=slots.block_start_S[slots_B],
            step_B=slots.step_S[slots_B],
        )
        strategies = [slots.task(slot).sampling.unmasking_strategy for slot in slot_numbers]
        chosen_BL = choose(strategies, candidates)
        errors = _errors(batch, proposals)
        broken_B = torch.tensor([bool(error) for error in errors], device=slots_B.device)
        chosen_BL &= ~broken_B.unsqueeze(1)
        slots.land(slots_B, chosen_BL, token_BL, self._eos_ids)
        slots.done_S[slots_B] |= broken_B
        done = slots.done_S[slots_B].tolist()
        fixed: list[tuple[list[int], list[int]]] = [([], []) for _ in slot_numbers]
        span_F, offset_F = chosen_BL.nonzero(as_tuple=True)
        position_F = slots.block_start_S[slots_B][span_F] + offset_F
        for span, position, token in zip(
            span_F.tolist(), position_F.tolist(), token_BL[span_F, offset_F].tolist(), strict=True
        ):
            fixed[span][0].append(position)
            fixed[span][1].append(token)
        return [
            SpanResult(slot, tuple(positions), tuple(tokens), done=is_done, void=False, error=error)
            for slot, (positions, tokens), is_done, error in zip(slot_numbers, fixed, done, errors, strict=True)
        ]


def _nothing_to_wait_for() -> None:
    """This runner's stream is a thread, which calls watchers itself."""


def _void(slot: int) -> SpanResult:
    return SpanResult(slot, (), (), done=True, void=True, error="")


def _errors(batch: PackedBatch, proposals: Proposals) -> list[str]:
    """One line for each span with a masked row whose logits are not finite, naming the first such row."""
    errors = [""] * len(batch.slots_B)
    if proposals.is_finite_R.all():
        return errors
    broken_R = (~proposals.is_finite_R).nonzero().squeeze(1)
    for span, position in zip(batch.span_R[broken_R].tolist(), batch.position_R[broken_R].tolist(), strict=True):
        errors[span] = errors[span] or f"logits are not finite at canvas position {position}"
    return errors
