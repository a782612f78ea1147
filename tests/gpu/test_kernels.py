"""The Triton kernels compute what the plain torch code computes.

They also run in Triton's interpreter, without a GPU: TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from dbench.serve.batch import SlotSizes, SlotTable  # noqa: E402
from dbench.serve.kernels import attention as attention_module  # noqa: E402
from dbench.serve.kernels.attention import (  # noqa: E402
    LaunchShape,
    SpanAttention,
    SpanKeys,
    Tiling,
    choose_tiling,
    counts_to_compile,
)
from dbench.serve.kernels.elementwise import Rotary, rms_norm, silu_times  # noqa: E402
from dbench.serve.kernels.layout import SpanTable, compact_masked, pack_rows, row_buffers  # noqa: E402
from dbench.serve.kernels.sampling import (  # noqa: E402
    RECORD_EXTRA,
    MaskedRows,
    ProposalBuffers,
    propose,
    unmask,
)
from dbench.serve.noise import DrawKeys  # noqa: E402
from dbench.serve.unmask import RULE_CODES, Candidates, RowWishes, choose  # noqa: E402
from dbench.serve.unmask import propose as propose_plainly  # noqa: E402
from dbench.unmasking_rules import UNMASKING_RULES, Measure  # noqa: E402

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no matrix product of bfloat16


def random_tensor(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(dtype).to(DEVICE)


def integers(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_rows_of_decode_and_refresh_spans_are_laid_out_with_their_places() -> None:
    canvas = torch.arange(3 * 64, device=DEVICE).view(3, 64)
    pages = integers([[4, 1, 0, 0], [2, 7, 3, 0], [5, 6, 0, 0]], torch.int64)
    slots = SlotTable(SlotSizes(3, 64, 8, 16, 0, DEVICE))
    slots.canvas_SC[:], slots.pages_SN[:] = canvas, pages
    slots.block_start_S[:] = integers([20, 8, 0], torch.int64)
    spans = SpanTable(integers([[0, 9, 49], [0, 1, 0], [19, 0, 0], [20, 0, 0]]))
    rows = row_buffers(60, 2, 8, DEVICE)
    pack_rows(spans, slots, rows, longest_span=40, logit_shift=1, last_place=143)
    positions = [*range(19, 28), *range(40)]
    assert rows.positions_T[:49].tolist() == positions
    assert rows.token_ids_T[:49].tolist() == [*range(19, 28), *range(64, 104)]
    page_of = [[4, 1], [2, 7, 3]]
    places = [page_of[0][p // 16] * 16 + p % 16 for p in positions[:9]]
    places += [page_of[1][p // 16] * 16 + p % 16 for p in positions[9:]]
    places[0] = 143
    assert rows.places_T[:49].tolist() == places
    assert rows.block_rows_BL.tolist() == [[*range(8)], [*range(16, 24)]]
    assert rows.block_positions_BL.tolist() == [[*range(19, 27)], [*range(7, 15)]]


def test_masked_places_of_running_blocks_are_listed_in_order() -> None:
    masked = torch.rand(5, 40, generator=torch.Generator().manual_seed(3)) < 0.5
    done = torch.tensor([False, True, False, False, False])
    slots = torch.tensor([4, 1, 0, 2])
    wanted = [
        span * 40 + int(offset)
        for span, slot in enumerate(slots.tolist())
        if not done[slot]
        for offset in masked[slot].nonzero()
    ]
    index, count = integers([7] * 100), integers([0])
    compact_masked(slots.int().to(DEVICE), masked.to(DEVICE), done.to(DEVICE), index, count)
    assert int(count) == len(wanted)
    assert index.tolist() == wanted + [0] * (100 - len(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalisation_and_gate_are_those_of_torch(dtype: torch.dtype) -> None:
    x, weight = random_tensor(5, 200, dtype=dtype), random_tensor(200, seed=1, dtype=dtype)
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x.float(), (200,), weight.float(), 1e-5).to(dtype))
    both, gated = random_tensor(5, 600, dtype=dtype), torch.empty(5, 300, dtype=dtype, device=DEVICE)
    silu_times(both, gated)
    gate, up = both.float().chunk(2, dim=1)
    torch.testing.assert_close(gated, (torch.nn.functional.silu(gate) * up).to(dtype))


@pytest.mark.parametrize(("heads", "kv_heads", "has_bias"), [(4, 4, False), (6, 2, True)])
def test_queries_and_keys_are_turned_and_keys_and_values_stored(heads: int, kv_heads: int, has_bias: bool) -> None:
    dim, all_heads = 16, heads + 2 * kv_heads
    angle = torch.arange(50, device=DEVICE).unsqueeze(1) * torch.linspace(0.1, 1, dim // 2, device=DEVICE)
    rotary = Rotary(angle.cos(), angle.sin(), heads, kv_heads)
    x, bias = random_tensor(7, all_heads, dim), random_tensor(all_heads * dim, seed=2)
    positions, places = integers([3, 4, 5, 40, 41, 42, 0]), integers([9, 8, 7, 6, 5, 63, 63], torch.int64)
    pool = torch.zeros(2, 64, kv_heads, dim, device=DEVICE)
    raw = x + bias.view(all_heads, dim) if has_bias else x.clone()
    low, high = raw[..., : dim // 2], raw[..., dim // 2 :]
    cos, sin = angle.cos()[positions.long()].unsqueeze(1), angle.sin()[positions.long()].unsqueeze(1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    wanted = torch.cat((turned[:, : heads + kv_heads], raw[:, heads + kv_heads :]), dim=1)
    keys_and_values = x[:, heads:].clone()
    queries = x[:, :heads].clone()

    rotary.turn_and_store(x, bias if has_bias else None, positions, places, pool)
    torch.testing.assert_close(x, wanted)
    torch.testing.assert_close(pool[0][places[:5]], wanted[:5, heads : heads + kv_heads])
    torch.testing.assert_close(pool[1][places[:5]], wanted[:5, heads + kv_heads :])
    stored = pool.clone()
    rotary.turn_and_store(keys_and_values, bias if has_bias else None, positions, places, pool)
    torch.testing.assert_close(pool[:, :63], stored[:, :63])
    rotary.turn_queries(queries, bias if has_bias else None, positions)
    torch.testing.assert_close(queries, wanted[:, :heads])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(2, 2, 8), (6, 2, 9)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_span_attention_is_attention(dtype: torch.dtype, heads: int, kv_heads: int, rows: int, chunks: int) -> None:
    dim, page_size, lengths = 32, 16, [100, 33, 64]
    pages = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(3, 8)
    pool = random_tensor(2, 24 * page_size, kv_heads, dim, dtype=dtype)
    slots = integers([2, 0])
    wide = random_tensor(2 * rows, heads + 3, dim, seed=4, dtype=dtype)
    q, out = wide[:, :heads], torch.empty(2 * rows, heads * dim, dtype=dtype, device=DEVICE)
    attention, tiling = SpanAttention(heads, kv_heads, dim), Tiling(chunks, 16, 16, 4, 2, chunks == 1)
    attention.reserve(2, rows, tiling, DEVICE)
    keys = SpanKeys(slots, pages.to(DEVICE), integers(lengths), page_size)
    for _ in range(2):  # the second run finds its counters as the first did
        attention.run(q, pool, keys, tiling, out)
    for span, slot in enumerate(slots.tolist()):
        key = torch.arange(lengths[slot])
        place = (pages[slot][key // page_size] * page_size + key % page_size).to(DEVICE)
        k, v = (pool[i][place].float().transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for i in (0, 1))
        own = q[span * rows : (span + 1) * rows].float().transpose(0, 1)
        wanted = torch.nn.functional.scaled_dot_product_attention(own, k, v).transpose(0, 1).flatten(1)
        found = out[span * rows : (span + 1) * rows].float()
        tolerance = 2e-2 if dtype == HALF else 1e-5
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shared_memory", "queries", "bytes_per_key_head", "cuts"),
    [
        (232_448, 32, 256, (32, 128)),  # H200: LLaDA and Dream as measured
        (232_448, 231, 256, (128, 128)),
        (232_448, 256, 512, (128, 32)),  # a head dim of 256: with 64 keys it would need 262,144 bytes
        (232_448, 256, 1024, (128, 16)),
        (101_376, 256, 1024, (32, 16)),  # cards for workstations
        (101_376, 32, 256, (32, 64)),  # in two stages
    ],
)
def test_a_tile_of_queries_and_its_keys_fit_into_shared_memory(
    shared_memory: int, queries: int, bytes_per_key_head: int, cuts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = attention_module._DeviceLimits(132, shared_memory)
    monkeypatch.setattr(attention_module._DeviceLimits, "of", lambda _: limits)
    shape = LaunchShape(64, queries, 8, bytes_per_key_head, longest=4096)
    tiling = choose_tiling(shape, DEVICE)
    assert (tiling.block_m, tiling.block_n) == cuts


def test_one_launch_of_every_kind_is_compiled() -> None:
    def cut(num_chunks: int, block_m: int = 32) -> Tiling:
        return Tiling(num_chunks, block_m, 128, 4, 3, values_first=False)

    tilings = {(1, 33): cut(4), (2, 33): cut(2), (3, 33): cut(1), (4, 33): cut(1), (5, 33): cut(1, 64), (6, 33): cut(1)}
    assert counts_to_compile(tilings) == (1, 3, 5)
    assert counts_to_compile({**tilings, (2, 32): cut(2), (1, 32): cut(1)}) == (1, 2, 3, 5)


EOS_IDS = integers([1, 3])
MASK_ID = 2


def slot_table(num_slots: int, length: int, rules: list[str], parameters: list[float]) -> SlotTable:
    """Running blocks of every rule, most of their rows masked, every other one hot."""
    table = SlotTable(SlotSizes(num_slots, 3 * length, length, 16, MASK_ID, DEVICE))
    numbers = range(num_slots)
    masked = torch.rand(num_slots, length, generator=torch.Generator().manual_seed(7)) < 0.7
    masked[:, 0] = True
    table.canvas_SC.fill_(5)
    table.masked_SL[:] = masked.to(DEVICE)
    table.done_S.fill_(False)
    table.block_start_S[:] = integers([length + i for i in numbers])
    table.step_S[:] = integers([i % 4 for i in numbers])
    table.seed_S[:] = integers([(-1) ** i * (i + 1) * 0x1234567890AB for i in numbers], torch.int64)
    table.temperature_S[:] = integers([0.0 if i % 2 else 0.8 for i in numbers], torch.float32)
    table.parameter_S[:] = integers(parameters, torch.float32)
    table.rule_S[:] = integers([RULE_CODES[rule] for rule in rules])
    return table


MEASURES = {"entropy": Measure.ENTROPY, "margin": Measure.MARGIN}


def test_every_rule_has_a_code() -> None:
    assert RULE_CODES.keys() == UNMASKING_RULES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.2, 6.0])
def test_a_step_of_mixed_rules_and_temperatures_is_that_of_the_plain_code(dtype: torch.dtype, scale: float) -> None:
    length, vocabulary = 12, 3000
    rules = [*UNMASKING_RULES, *UNMASKING_RULES]
    parameters = {"conf_threshold": 0.05, "conf_quota": 3, "conf_dynamic": 1.97, "entropy": 7.3, "margin": 0.01}
    state = slot_table(len(rules), length, rules, [parameters.get(rule, 0.0) for rule in rules])
    slots = integers([*reversed(range(len(rules)))])
    places = state.masked_SL[slots.long()].flatten().nonzero().flatten()
    logits = random_tensor(len(places), vocabulary, seed=9, scale=scale, dtype=dtype)
    logits[0, 5:20] = logits.max() + 1
    logits[:, MASK_ID] = 1e30
    buffers = ProposalBuffers(len(places) + 4, len(rules), length, DEVICE)
    index, count = torch.zeros(len(places) + 4, dtype=torch.int32, device=DEVICE), integers([0])
    compact_masked(slots, state.masked_SL, state.done_S, index, count)
    first = 20
    for part, rank in ((logits[:first], 0), (logits[first:], first)):
        propose(part, rank, MaskedRows(index, count), slots, state, buffers)

    span_R, offset_R = places // length, places % length
    slot_R = slots.long()[span_R]
    position_R = state.block_start_S[slot_R] + offset_R
    keys = DrawKeys(state.seed_S[slot_R], position_R, state.step_S[slot_R])
    measured = {
        measure: integers([rules[slot] == rule for slot in slot_R.tolist()], torch.bool)
        for rule, measure in MEASURES.items()
    }
    plain = propose_plainly(logits.clone(), MASK_ID, RowWishes(keys, state.temperature_S[slot_R], measured))
    assert buffers.token_BL[span_R, offset_R].tolist() == plain.token_R.tolist()
    torch.testing.assert_close(buffers.score_BL[span_R, offset_R], plain.score_R, rtol=1e-4, atol=1e-5)
    assert bool(buffers.is_finite_BL[span_R, offset_R].all())

    score_BL = torch.full((len(rules), length), -torch.inf, device=DEVICE)
    score_BL[span_R, offset_R] = buffers.score_BL[span_R, offset_R]
    at = slots.long()
    candidates = Candidates(
        state.masked_SL[at].clone(), score_BL, state.parameter_S[at], state.seed_S[at], state.block_start_S[at],
        state.step_S[at].clone(),
    )  # fmt: skip
    chosen_BL = choose([rules[slot] for slot in slots.tolist()], candidates)
    record = torch.zeros(len(rules), length + RECORD_EXTRA, dtype=torch.int32, device=DEVICE)
    unmask(slots, buffers, state, EOS_IDS, record)
    assert (record[:, :length] >= 0).tolist() == chosen_BL.tolist()
    tokens = torch.where(chosen_BL, buffers.token_BL, -1)
    assert record[:, :length].tolist() == tokens.tolist()
    assert (state.masked_SL[at] == (candidates.masked_BL & ~chosen_BL)).all()
    assert (state.step_S[at] == candidates.step_B + 1).all()
    for span, slot in enumerate(slots.tolist()):
        start = int(state.block_start_S[slot])
        ids = state.canvas_SC[slot, start : start + length]
        assert (ids[chosen_BL[span]] == tokens[span][chosen_BL[span]]).all()


@pytest.mark.parametrize("length", [100, 130])
def test_rules_of_long_blocks_choose_what_the_plain_code_chooses(length: int) -> None:
    rules = [*UNMASKING_RULES]
    parameters = {"conf_threshold": 0.6, "conf_quota": 70, "conf_dynamic": 30.0, "entropy": -0.6, "margin": 0.5}
    state = slot_table(len(rules), length, rules, [parameters.get(rule, 0.0) for rule in rules])
    slots = integers([*range(len(rules))])
    buffers = ProposalBuffers(1, len(rules), length, DEVICE)
    buffers.score_BL[:] = random_tensor(len(rules), length, seed=5).sigmoid().mul(20).round().div(20)  # many are equal
    buffers.token_BL[:] = 9
    buffers.is_finite_BL[:] = 1
    score_BL = buffers.score_BL.where(state.masked_SL, -torch.inf)
    candidates = Candidates(
        state.masked_SL.clone(), score_BL, state.parameter_S, state.seed_S, state.block_start_S, state.step_S.clone()
    )
    chosen_BL = choose(rules, candidates)
    assert int(chosen_BL.sum(dim=1).min()) > 1
    record = torch.zeros(len(rules), length + RECORD_EXTRA, dtype=torch.int32, device=DEVICE)
    unmask(slots, buffers, state, EOS_IDS, record)
    assert (record[:, :length] >= 0).tolist() == chosen_BL.tolist()
    assert torch.equal(state.masked_SL, candidates.masked_BL & ~chosen_BL)


def test_blocks_end_without_masks_or_at_an_end_of_text_and_stay_as_they_are() -> None:
    length = 8
    state = slot_table(4, length, ["conf_quota"] * 4, [1.0] * 4)
    state.temperature_S.zero_()
    state.masked_SL[:] = False
    state.masked_SL[0, 5] = True  # the last mask
    state.masked_SL[1, 2:] = True  # an end of text becomes its first token
    state.masked_SL[2, 2:] = True  # the same, ignored
    state.ignore_eos_S[2] = True
    state.masked_SL[3, 1:] = True
    state.done_S[3] = True
    slots = integers([0, 1, 2, 3])
    buffers = ProposalBuffers(32, 4, length, DEVICE)
    buffers.token_BL[:] = 3
    buffers.token_BL[0] = 9
    buffers.score_BL[:] = torch.linspace(0.9, 0.1, length, device=DEVICE)
    buffers.is_finite_BL[:] = 1
    record = torch.zeros(4, length + RECORD_EXTRA, dtype=torch.int32, device=DEVICE)
    unmask(slots, buffers, state, EOS_IDS, record)
    assert record[:, length].tolist() == [1, 1, 0, 1]
    assert record[:, length + 1].tolist() == [0, 0, 0, 1]
    assert record[3, :length].tolist() == [-1] * length
    assert state.masked_SL[3].tolist() == [False, *[True] * 7]
    assert state.done_S.tolist() == [True, True, False, True]


def test_logits_that_are_not_finite_end_their_block_alone() -> None:
    length, vocabulary = 4, 2000
    state = slot_table(2, length, ["conf_threshold"] * 2, [0.5] * 2)
    state.masked_SL[:] = True
    logits = random_tensor(8, vocabulary)
    logits[5, 1500] = torch.nan
    slots, index, count = integers([0, 1]), integers(list(range(8))), integers([8])
    buffers = ProposalBuffers(8, 2, length, DEVICE)
    for bad in (torch.nan, torch.inf):
        logits[5, 1500] = bad
        propose(logits, 0, MaskedRows(index, count), slots, state, buffers)
        assert buffers.is_finite_BL.tolist() == [[1] * 4, [1, 0, 1, 1]]
    record = torch.zeros(2, length + RECORD_EXTRA, dtype=torch.int32, device=DEVICE)
    unmask(slots, buffers, state, EOS_IDS, record)
    assert record[:, length + 2].tolist() == [-1, length + 1 + 1]
    assert record[1, :length].tolist() == [-1] * 4
    assert state.done_S.tolist() == [False, True]
