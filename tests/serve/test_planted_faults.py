"""The comparison with the reference sees the faults that decoders of this kind have had: each one is planted here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from dbench.serve import families, torch_runner
from dbench.serve.batch import PackedBatch, SlotTable, pack
from dbench.serve.runner import LayerWatcher, Phase, Runner, Span, StepResult, Ticket
from dbench.serve.sequence import BlockTask, SamplingParameters
from tests.serve.checkpoints import MASK, TINY, TINY_DREAM, tiny_dream_tensors, tiny_tensors, write_checkpoint
from tests.serve.decoding import Job, decode_all, engine_on, limits_for, runner_for
from tests.serve.reference import Reference

BLOCK_LENGTH = 8
RULES = (
    SamplingParameters("conf_quota", fixed_unmask_quota=2),
    SamplingParameters("conf_threshold", confidence_threshold=0.3),
    SamplingParameters("random", 0.5),
)


def jobs() -> list[Job]:
    """Requests of three blocks, with prompts that hold the mask id in their middle."""
    return [Job([3, 50, MASK, 7, 31, MASK, *range(i)], 24, rule, seed=i) for i, rule in enumerate(RULES)]


def checkpoint_of(directory: Path, family: str) -> Path:
    if family == "dream":
        return write_checkpoint(directory, tiny_dream_tensors(), config=TINY_DREAM)
    return write_checkpoint(directory, tiny_tensors(), config=TINY)


def reference_ids(directory: Path) -> list[list[int]]:
    reference = Reference(directory)
    return [reference.decode(job.prompt, 24, BLOCK_LENGTH, job.sampling, job.seed).ids for job in jobs()]


def engine_ids(
    directory: Path, *, wrap: Callable[[Runner], Runner] = lambda runner: runner, logit_shift: int | None = None
) -> list[list[int]]:
    """What the engine gives, one request at a time; nothing for one on which it broke a rule of its own."""
    found = []
    for job in jobs():
        limits = limits_for(directory, BLOCK_LENGTH, overlap=False)
        if logit_shift is not None:
            limits = replace(limits, logit_shift=logit_shift)
        with engine_on(wrap(runner_for(directory, BLOCK_LENGTH)), limits) as engine:
            try:
                decode_all(engine, [job], BLOCK_LENGTH)
            except AssertionError:
                job.ids.clear()
            found.append(job.ids)
    return found


def number_that_differ(directory: Path, found: list[list[int]]) -> int:
    return sum(ids != wanted for ids, wanted in zip(found, reference_ids(directory), strict=True))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_without_a_fault_nothing_differs(family: str, tmp_path: Path) -> None:
    directory = checkpoint_of(tmp_path, family)
    assert number_that_differ(directory, engine_ids(directory)) == 0


@pytest.mark.parametrize(("family", "wrong_shift"), [("dream", 0), ("llada", 1)])
def test_a_wrong_shift_is_seen(family: str, wrong_shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint_of(tmp_path, family)
    wrong = replace(families.FAMILIES[family], logit_shift=wrong_shift)
    monkeypatch.setitem(families.FAMILIES, family, wrong)
    assert number_that_differ(directory, engine_ids(directory)) == len(RULES)


def test_a_shift_that_the_engine_has_not_heard_of_is_seen(tmp_path: Path) -> None:
    directory = checkpoint_of(tmp_path, "dream")
    assert number_that_differ(directory, engine_ids(directory, logit_shift=0)) == len(RULES)


def test_a_query_row_that_overwrites_its_keys_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack_and_write_all(table: SlotTable, spans: Sequence[Span], logit_shift: int) -> PackedBatch:
        batch = pack(table, spans, logit_shift)
        unshifted = pack(table, spans, 0)
        return replace(batch, kv_slots_T=unshifted.kv_slots_T)

    directory = checkpoint_of(tmp_path, "dream")
    monkeypatch.setattr(torch_runner, "pack", pack_and_write_all)
    assert number_that_differ(directory, engine_ids(directory)) > 0


class KeepsOldKeys:
    """A runner that leaves the refresh out after a request's first block, and decodes with the keys that are there."""

    def __init__(self, inner: Runner, logit_shift: int) -> None:
        self._inner = inner
        self._shift = logit_shift
        self._tasks: dict[int, BlockTask] = {}
        self._pages: tuple[int, ...] = ()

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        if task.key.block_index == 0:
            self._pages = pages
        assert sorted(self._pages) == sorted(pages), "a request alone gets the same pages again"
        self._tasks[slot] = task
        self._inner.attach(slot, task, self._pages)

    def watch_layers(self, watcher: LayerWatcher) -> None:
        self._inner.watch_layers(watcher)

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        return self._inner.launch(tuple(self._changed(span) for span in spans))

    def collect(self, ticket: Ticket) -> StepResult:
        return self._inner.collect(ticket)

    def detach(self, slot: int) -> None:
        self._inner.detach(slot)

    def close(self) -> None:
        self._inner.close()

    def _changed(self, span: Span) -> Span:
        task = self._tasks[span.slot]
        if span.phase is Phase.DECODE or task.key.block_index == 0:
            return span
        start = task.block_start
        return Span(span.slot, Phase.DECODE, start - self._shift, BLOCK_LENGTH + self._shift, start)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_refresh_left_out_between_blocks_is_seen(family: str, tmp_path: Path) -> None:
    directory, shift = checkpoint_of(tmp_path, family), families.FAMILIES[family].logit_shift
    found = engine_ids(directory, wrap=lambda runner: KeepsOldKeys(runner, shift))
    wanted = reference_ids(directory)
    assert [ids[:BLOCK_LENGTH] for ids in found] == [ids[:BLOCK_LENGTH] for ids in wanted]
    assert number_that_differ(directory, found) == len(RULES)


def starts_at_the_first_mask_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the block begins is read off the canvas."""
    fill = SlotTable.fill

    def fill_by_id(table: SlotTable, slot: int, task: BlockTask, pages: tuple[int, ...]) -> None:
        fill(table, slot, task, pages)
        table.block_start_S[slot] = (table.canvas_SC[slot] == MASK).nonzero()[0, 0]

    monkeypatch.setattr(SlotTable, "fill", fill_by_id)


def ends_without_mask_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the block goes on is read off the canvas up to its end."""
    land = SlotTable.land

    def land_by_id(table: SlotTable, slots_B: Tensor, chosen_BL: Tensor, token_BL: Tensor, eos_ids: Tensor) -> None:
        land(table, slots_B, chosen_BL, token_BL, eos_ids)
        for slot in slots_B.tolist():
            end = int(table.block_start_S[slot]) + BLOCK_LENGTH
            table.done_S[slot] = not bool((table.canvas_SC[slot, :end] == MASK).any())

    monkeypatch.setattr(SlotTable, "land", land_by_id)


@pytest.mark.parametrize("plant", [starts_at_the_first_mask_id, ends_without_mask_ids])
def test_masks_found_by_id_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint_of(tmp_path, "llada")
    plant(monkeypatch)
    assert number_that_differ(directory, engine_ids(directory)) == len(RULES)
