"""A block refreshed by one runner and decoded by another, id for id as by one alone; and layers as they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dbench.serve.families import FAMILIES, read_model_config
from dbench.serve.kv import KvPool
from dbench.serve.policy import SPANS
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import BlockTask, SamplingParameters
from dbench.serve.torch_runner import TorchRunner
from tests.serve.checkpoints import EOS, TINY, TINY_DREAM, tiny_dream_tensors, tiny_tensors, write_checkpoint
from tests.serve.decoding import PAGE_SIZE, Job, runner_for, task_of

BLOCK = 8
HERE, THERE = (4, 9, 2, 7, 30, 31), (600, 3, 77, 5, 12, 13)
"""Pages on either runner."""
SAMPLINGS = (
    SamplingParameters("conf_threshold", confidence_threshold=0.9),
    SamplingParameters("conf_quota", fixed_unmask_quota=3),
    SamplingParameters("random", temperature=0.8),
    SamplingParameters("entropy", temperature=0.4, entropy_threshold=0.3),
)


@pytest.fixture(scope="module", params=["llada", "dream"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "dream":
        return write_checkpoint(directory, tiny_dream_tensors(), config=TINY_DREAM)
    return write_checkpoint(directory, tiny_tensors(), config=TINY)


def span(task: BlockTask, phase: Phase, shift: int, slot: int = 0) -> Span:
    rows = SPANS["exact"][phase](task, shift)
    return Span(slot, phase, rows.start, rows.num_rows, rows.written_from)


def decode_rest(runner: TorchRunner, task: BlockTask, shift: int, fixed: dict[int, int], slot: int = 0) -> list[int]:
    """Decode steps until the block ends; its ids."""
    for _ in range(BLOCK):
        (got,) = runner.collect(runner.launch((span(task, Phase.DECODE, shift, slot),))).spans
        fixed = fixed | dict(zip(got.positions, got.token_ids, strict=True))
        if got.done:
            return [fixed[position] for position in range(task.block_start, task.block_end) if position in fixed]
    raise AssertionError("the block never ends")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.unmasking_strategy)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_block_goes_on_elsewhere_as_it_would_have_here(
    checkpoint: Path, sampling: SamplingParameters, ignore_eos: bool
) -> None:
    shift = FAMILIES[read_model_config(checkpoint).family].logit_shift
    task = task_of(Job([7, 3, EOS, 9, 11] * 4, 2 * BLOCK, sampling, seed=5, ignore_eos=ignore_eos), BLOCK)
    sender, receiver = runner_for(checkpoint, BLOCK), runner_for(checkpoint, BLOCK)
    sender.attach(0, task, HERE)
    (refreshed,) = sender.collect(sender.launch((span(task, Phase.REFRESH, shift),))).spans
    assert not refreshed.done
    num_pages = -(-task.canvas_length // PAGE_SIZE)
    for layer in range(sender.kv.num_layers):
        receiver.kv.write_pages(layer, THERE[:num_pages], sender.kv.read_pages(layer, HERE[:num_pages]))
    fixed = dict(zip(refreshed.positions, refreshed.token_ids, strict=True))
    receiver.attach(3, task, THERE, fixed)
    there = decode_rest(receiver, task, shift, fixed, slot=3)
    here = decode_rest(sender, task, shift, fixed)
    sender.close()
    receiver.close()
    assert there == here


@dataclass
class Notes:
    """A watcher that copies each layer's pages at the moment it is told of them."""

    kv: KvPool
    told: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)

    def layer_written(self, slots: tuple[int, ...], layer: int, wait: Callable[[], None]) -> None:
        wait()
        self.told.append((slots, layer))
        self.copies.append(self.kv.read_pages(layer, HERE))


def test_a_watcher_is_told_of_every_layer_of_a_refresh_once_its_keys_and_values_are_there(checkpoint: Path) -> None:
    shift = FAMILIES[read_model_config(checkpoint).family].logit_shift
    sampling = SamplingParameters("conf_quota", fixed_unmask_quota=1)
    tasks = [task_of(Job([5] * length, BLOCK, sampling), BLOCK) for length in (20, 9, 12)]
    runner = runner_for(checkpoint, BLOCK)
    notes = Notes(runner.kv)
    runner.watch_layers(notes)
    pages = (HERE, (40, 41, 42), (50, 51, 52))
    runner.attach(0, tasks[0], pages[0])
    runner.attach(1, tasks[1], pages[1])
    runner.collect(runner.launch(tuple(span(tasks[slot], Phase.REFRESH, shift, slot) for slot in (0, 1))))
    layers = range(runner.kv.num_layers)
    assert notes.told == [((0, 1), layer) for layer in layers]
    for layer in layers:
        assert torch.equal(notes.copies[layer], runner.kv.read_pages(layer, HERE))
    runner.attach(2, tasks[2], pages[2])
    mixed = (span(tasks[0], Phase.DECODE, shift, 0), span(tasks[2], Phase.REFRESH, shift, 2))
    runner.collect(runner.launch(mixed))
    assert notes.told[len(layers) :] == [((2,), layer) for layer in layers]
    runner.collect(runner.launch((span(tasks[1], Phase.DECODE, shift, 1),)))
    assert len(notes.told) == 2 * len(layers)
    runner.close()


def test_pages_of_another_number_are_refused(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, BLOCK)
    with pytest.raises(ValueError, match="for 2 pages of"):
        runner.kv.write_pages(0, (1, 2), runner.kv.read_pages(0, (1, 2, 3)))
    runner.close()
