"""Packing: which rows a launch computes, where their K and V go, and which of them need logits."""

from __future__ import annotations

import pytest
import torch

from dbench.serve.batch import SlotSizes, SlotTable, pack
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import SamplingParameters
from tests.serve.checkpoints import MASK
from tests.serve.decoding import Job, task_of

PAGE, BLOCK = 4, 4


def table_of(*jobs: Job) -> SlotTable:
    """Job i in slot i, on pages 10 i + 2, 10 i + 1, 10 i."""
    table = SlotTable(SlotSizes(4, 12, BLOCK, PAGE, MASK, torch.device("cpu")))
    for slot, job in enumerate(jobs):
        table.fill(slot, task_of(job, BLOCK), (10 * slot + 2, 10 * slot + 1, 10 * slot))
    return table


def land(table: SlotTable, slot: int, tokens: dict[int, int], eos: tuple[int, ...] = ()) -> None:
    """Fix tokens at offsets of the slot's block."""
    chosen_BL = torch.tensor([[offset in tokens for offset in range(BLOCK)]])
    token_BL = torch.tensor([[tokens.get(offset, 0) for offset in range(BLOCK)]])
    table.land(torch.tensor([slot]), chosen_BL, token_BL, torch.tensor(eos, dtype=torch.int64))


def test_a_refresh_and_a_decode_lie_one_after_another() -> None:
    table = table_of(Job([7, 8], 8), Job([5, MASK, 6], 4))
    land(table, 1, {1: 40})
    batch = pack(table, [Span(1, Phase.DECODE, 3, 4), Span(0, Phase.REFRESH, 0, 10)], 0)
    assert batch.positions_T.tolist() == [3, 4, 5, 6, *range(10)]
    assert batch.token_ids_T.tolist() == [MASK, 40, MASK, MASK, 7, 8, *[MASK] * 8]
    assert batch.kv_slots_T.tolist() == [12 * 4 + 3, 11 * 4, 11 * 4 + 1, 11 * 4 + 2, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1]
    assert [(s.num_rows, s.num_keys, s.pages_N.tolist()) for s in batch.layout] == [
        (4, 7, [12, 11]),
        (10, 10, [2, 1, 0]),
    ]


def test_only_masked_rows_of_the_block_need_logits() -> None:
    table = table_of(Job([7, 8], 8), Job([5, MASK, 6], 4))
    land(table, 1, {1: 40})
    batch = pack(table, [Span(1, Phase.DECODE, 3, 4), Span(0, Phase.REFRESH, 0, 10)], 0)
    assert batch.output_rows_R.tolist() == [0, 2, 3, 6, 7, 8, 9]
    assert batch.position_R.tolist() == [3, 5, 6, 2, 3, 4, 5]
    assert batch.span_R.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.offset_R.tolist() == [0, 2, 3, 0, 1, 2, 3]
    assert [sequence.num_rows for sequence in batch.output_layout] == [3, 4]


def test_a_shifted_model_reads_its_predictions_one_row_left() -> None:
    table = table_of(Job([7, 8], 4), Job([9], 4))
    land(table, 0, {0: 11, 2: 12})
    batch = pack(table, [Span(0, Phase.DECODE, 1, 5, written_from=2), Span(1, Phase.REFRESH, 0, 5)], 1)
    assert batch.positions_T.tolist() == [1, 2, 3, 4, 5, *range(5)]
    assert batch.kv_slots_T.tolist()[:5] == [-1, 10, 11, 4, 5]
    assert batch.kv_slots_T.tolist()[5:] == [48, 49, 50, 51, 44]
    assert batch.position_R.tolist() == [3, 5, 1, 2, 3, 4]
    assert batch.output_rows_R.tolist() == [1, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("ignore_eos", "tokens", "done"),
    [
        (False, {0: 1, 1: 61}, True),
        (False, {1: 61}, False),
        (False, {0: 61}, True),
        (False, {0: 1, 2: 61, 3: 61}, False),
        (True, {0: 61}, False),
        (True, {0: 61, 1: 1, 2: 1, 3: 61}, True),
        (False, {0: 1, 1: 1, 2: 1, 3: 1}, True),
    ],
)
def test_a_block_ends_without_masks_or_without_masks_before_its_first_eos(
    ignore_eos: bool, tokens: dict[int, int], done: bool
) -> None:
    table = table_of(Job([61, 61, 5], 8, ignore_eos=ignore_eos))
    land(table, 0, tokens, eos=(61, 62))
    assert bool(table.done_S[0]) is done


def test_landing_counts_steps_and_leaves_other_slots_alone() -> None:
    table = table_of(Job([1], 4), Job([2], 4))
    land(table, 1, {2: 33})
    assert table.step_S.tolist()[:2] == [0, 1]
    assert table.canvas_SC[0, :5].tolist() == [1, *[MASK] * 4]
    assert table.canvas_SC[1, :5].tolist() == [2, MASK, MASK, 33, MASK]
    assert table.masked_SL[:2].tolist() == [[True] * 4, [True, True, False, True]]


def test_a_slot_that_is_taken_again_starts_from_nothing() -> None:
    table = table_of(Job([1] * 8, 4, SamplingParameters("random", temperature=2.0), seed=5))
    land(table, 0, {0: 33, 1: 33, 2: 33, 3: 33})
    table.clear(0)
    assert bool(table.done_S[0])
    table.fill(0, task_of(Job([3], 4), BLOCK), (9, 8))
    batch = pack(table, [Span(0, Phase.REFRESH, 0, 5)], 0)
    assert batch.token_ids_T.tolist() == [3, *[MASK] * 4]
    assert batch.kv_slots_T.tolist() == [36, 37, 38, 39, 32]
    assert len(batch.output_rows_R) == 4
    assert (int(table.step_S[0]), float(table.temperature_S[0]), int(table.seed_S[0])) == (0, 0.0, 0)
    assert float(table.parameter_S[0]) == pytest.approx(0.9)
