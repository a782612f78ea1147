"""Kernels that turn logits into fixed tokens: a proposal per masked row, and the rule of every block.

They compute what `unmask.py` and `noise.py` compute, of all rules and temperatures mixed, in three launches and
without a tensor of rows x vocabulary beside the logits. Shapes: R rows with logits, V vocabulary, Y parts of it,
B spans, L block length, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dbench.serve.batch import SlotTable
from dbench.serve.noise import Tag
from dbench.serve.unmask import RULE_CODES

QUOTA: tl.constexpr = tl.constexpr(RULE_CODES["conf_quota"])
DYNAMIC: tl.constexpr = tl.constexpr(RULE_CODES["conf_dynamic"])
RANDOM: tl.constexpr = tl.constexpr(RULE_CODES["random"])
ENTROPY: tl.constexpr = tl.constexpr(RULE_CODES["entropy"])
MARGIN: tl.constexpr = tl.constexpr(RULE_CODES["margin"])

VOCABULARY_PARTS = 8
LANES = 1024
NOISE_LANES = 256
"""Draws at a time; each serves four tokens."""
RECORD_EXTRA = 3
"""Columns of a step record after the L tokens: done, void, first position with bad logits or -1."""
NOT_FIXED = -1
LONGEST_PAIRED: tl.constexpr = tl.constexpr(128)
"""Blocks up to this length compare all pairs of rows at once; for 512 that takes a minute to compile."""


class ProposalBuffers:
    """Room for the partial results of R rows and the proposals of B blocks."""

    def __init__(self, num_rows: int, num_spans: int, block_length: int, device: torch.device) -> None:
        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.floats = room(6, num_rows, VOCABULARY_PARTS)
        self.tokens = room(2, num_rows, VOCABULARY_PARTS, dtype=torch.int32)
        self.token_BL = room(num_spans, block_length, dtype=torch.int32)
        self.score_BL = room(num_spans, block_length)
        self.is_finite_BL = room(num_spans, block_length, dtype=torch.int32)


@triton.jit
def _gumbel(drawn):
    u = tl.minimum((drawn.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    rest = 1.0 - u
    log1p = tl.where(rest == 1.0, -u, tl.log(rest) * u / (1.0 - rest))  # exact where 1 - u rounds (Kahan)
    return -tl.log(-log1p)


@triton.jit
def _first_of_largest(values, tokens):
    """The largest value, and the lowest token that has it."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, tokens, 2147483647), 0)


@triton.jit
def _merged(largest, token, second, total, slope):
    """Of all lanes: the largest logit, its token, the second largest, sum of weights, and of weight x distance."""
    top, top_token = _first_of_largest(largest, token)
    is_top = (largest == top) & (token == top_token)
    runner_up = tl.max(tl.where(is_top, second, largest), 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    shift = tl.where(largest == float("-inf"), 0.0, largest - base)
    fade = tl.exp(shift)
    all_slope = tl.sum(tl.where(total > 0, fade * (slope + shift * total), 0.0), 0)
    all_total = tl.sum(tl.where(total == 0, 0.0, fade * total), 0)
    return top, top_token, runner_up, all_total, all_slope


@triton.jit
def _scan_noisy(
    logits_ptr, begin, end, mask_token, temperature, seed, position, step,
    DRAWS: tl.constexpr, TOKEN_TAG: tl.constexpr,
):  # fmt: skip
    """The largest of logit + temperature x noise, its token, and that token's logit."""
    best = tl.full([DRAWS], float("-inf"), tl.float32)
    best_token = tl.zeros([DRAWS], tl.int32)
    best_logit = tl.full([DRAWS], float("-inf"), tl.float32)
    for first in range(begin, end, DRAWS * 4):
        quarter = first // 4 + tl.arange(0, DRAWS)
        zero = tl.zeros([DRAWS], tl.uint32)
        d0, d1, d2, d3 = tl.philox(seed, quarter.to(tl.uint32), zero + position, zero + step, zero + TOKEN_TAG)
        for word in tl.static_range(4):
            drawn = d0 if word == 0 else (d1 if word == 1 else (d2 if word == 2 else d3))
            at = quarter * 4 + word
            x = tl.load(logits_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
            x = tl.where(at == mask_token, float("-inf"), x)
            noisy = _gumbel(drawn) * temperature + x
            better = noisy > best
            best = tl.where(better, noisy, best)
            best_token = tl.where(better, at, best_token)
            best_logit = tl.where(better, x, best_logit)
    noisy_top, noisy_token = _first_of_largest(best, best_token)
    picked = (best == noisy_top) & (best_token == noisy_token)
    return noisy_top, noisy_token, tl.max(tl.where(picked, best_logit, float("-inf")), 0)


@triton.jit(do_not_specialize=["first_rank"])
def _scan_kernel(
    logits_ptr, place_ptr, count_ptr, slots_ptr, temperature_ptr, seed_ptr, block_start_ptr, step_ptr,
    floats_ptr, tokens_ptr, first_rank, vocabulary, part_size, mask_token, logits_stride, plane,
    L: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, DRAWS: tl.constexpr, TOKEN_TAG: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    rank = first_rank + row
    if rank >= tl.load(count_ptr):
        return
    place = tl.load(place_ptr + rank)
    slot = tl.load(slots_ptr + place // L).to(tl.int64)
    logits_ptr += row.to(tl.int64) * logits_stride
    begin = part * part_size
    end = tl.minimum(begin + part_size, vocabulary)
    largest = tl.full([WIDTH], float("-inf"), tl.float32)
    second = tl.full([WIDTH], float("-inf"), tl.float32)
    token = tl.zeros([WIDTH], tl.int32)
    total = tl.zeros([WIDTH], tl.float32)
    slope = tl.zeros([WIDTH], tl.float32)
    for first in range(begin, end, WIDTH):
        at = first + tl.arange(0, WIDTH)
        x = tl.load(logits_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
        x = tl.where(at == mask_token, float("-inf"), x)
        token = tl.where(x > largest, at, token)
        second = tl.maximum(second, tl.minimum(largest, x))
        new_largest = tl.maximum(largest, x)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shift = tl.where(largest == float("-inf"), 0.0, largest - base)
        fade = tl.exp(shift)
        weight = tl.exp(x - base)
        slope = fade * (slope + shift * total) + tl.where(weight > 0, weight * (x - base), 0.0)
        total = total * fade + weight
        largest = new_largest
    top, top_token, runner_up, all_total, all_slope = _merged(largest, token, second, total, slope)
    at_part = row * PARTS + part
    tl.store(floats_ptr + at_part, top)
    tl.store(floats_ptr + plane + at_part, runner_up)
    tl.store(floats_ptr + 2 * plane + at_part, all_total)
    tl.store(floats_ptr + 3 * plane + at_part, all_slope)
    tl.store(tokens_ptr + at_part, top_token)

    temperature = tl.load(temperature_ptr + slot)
    if temperature > 0:
        seed = tl.load(seed_ptr + slot)
        position = (tl.load(block_start_ptr + slot) + place % L).to(tl.uint32)
        step = tl.load(step_ptr + slot).to(tl.uint32)
        noisy_top, noisy_token, noisy_logit = _scan_noisy(
            logits_ptr, begin, end, mask_token, temperature, seed, position, step, DRAWS, TOKEN_TAG
        )
        tl.store(floats_ptr + 4 * plane + at_part, noisy_top)
        tl.store(floats_ptr + 5 * plane + at_part, noisy_logit)
        tl.store(tokens_ptr + plane + at_part, noisy_token)


@triton.jit(do_not_specialize=["first_rank"])
def _propose_kernel(
    place_ptr, count_ptr, slots_ptr, temperature_ptr, rule_ptr, floats_ptr, tokens_ptr,
    token_ptr, score_ptr, finite_ptr, first_rank, plane, L: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    rank = first_rank + row
    if rank >= tl.load(count_ptr):
        return
    place = tl.load(place_ptr + rank)
    slot = tl.load(slots_ptr + place // L).to(tl.int64)
    at = row * PARTS + tl.arange(0, PARTS)
    largest = tl.load(floats_ptr + at)
    token = tl.load(tokens_ptr + at)
    total = tl.load(floats_ptr + 2 * plane + at)
    slope = tl.load(floats_ptr + 3 * plane + at)
    second = tl.load(floats_ptr + plane + at)
    top, top_token, runner_up, all_total, all_slope = _merged(largest, token, second, total, slope)
    base = tl.where(top == float("-inf"), 0.0, top)
    logit = top
    if tl.load(temperature_ptr + slot) > 0:
        noisy, noisy_token = tl.load(floats_ptr + 4 * plane + at), tl.load(tokens_ptr + plane + at)
        best, top_token = _first_of_largest(noisy, noisy_token)
        picked = (noisy == best) & (noisy_token == top_token)
        logit = tl.max(tl.where(picked, tl.load(floats_ptr + 5 * plane + at), float("-inf")), 0)
    rule = tl.load(rule_ptr + slot)
    score = tl.exp(logit - base) / all_total
    if rule == ENTROPY:
        score = all_slope / all_total - tl.log(all_total)
    if rule == MARGIN:
        score = (1.0 - tl.exp(runner_up - base)) / all_total
    is_finite = (all_total > 0) & (all_total < float("inf")) & (tl.abs(top) < float("inf"))
    tl.store(token_ptr + place, top_token)
    tl.store(score_ptr + place, score)
    tl.store(finite_ptr + place, is_finite.to(tl.int32))


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The rows whose logits are computed: their places (span x L + offset), and how many count."""

    place_R: Tensor
    count: Tensor


def propose(
    logits_RV: Tensor,
    first_rank: int,
    rows: MaskedRows,
    slots_B: Tensor,
    slots: SlotTable,
    buffers: ProposalBuffers,
) -> None:
    """Token, score and finiteness of the rows from `first_rank` on, into `buffers`. Does not wait.

    `logits_RV` holds those rows and is left as it is.
    """
    num_rows, vocabulary = logits_RV.shape
    length = slots.masked_SL.shape[1]
    part_size = triton.cdiv(triton.cdiv(vocabulary, VOCABULARY_PARTS), LANES) * LANES
    plane = buffers.floats.stride(0)
    _scan_kernel[(num_rows, VOCABULARY_PARTS)](
        logits_RV, rows.place_R, rows.count, slots_B, slots.temperature_S, slots.seed_S, slots.block_start_S,
        slots.step_S, buffers.floats, buffers.tokens, first_rank, vocabulary, part_size,
        slots.sizes.mask_token_id,
        logits_RV.stride(0), plane,
        L=length, PARTS=VOCABULARY_PARTS, WIDTH=LANES, DRAWS=NOISE_LANES, TOKEN_TAG=int(Tag.TOKEN), num_warps=4,
    )  # fmt: skip
    _propose_kernel[(num_rows,)](
        rows.place_R, rows.count, slots_B, slots.temperature_S, slots.rule_S, buffers.floats, buffers.tokens,
        buffers.token_BL, buffers.score_BL, buffers.is_finite_BL, first_rank, plane,
        L=length, PARTS=VOCABULARY_PARTS, num_warps=1,
    )  # fmt: skip


@triton.jit
def _rank_in_turn(score, score_ptr, masked_ptr, L: tl.constexpr, L_PADDED: tl.constexpr):
    """How many masked rows are surer than each row, from one rival after another."""
    offset = tl.arange(0, L_PADDED)
    rank = tl.zeros([L_PADDED], tl.int32)
    for rival in range(L):
        rival_score, is_masked = tl.load(score_ptr + rival), tl.load(masked_ptr + rival).to(tl.int32)
        ahead = (rival_score > score) | ((rival_score == score) & (rival < offset))
        rank += tl.where(ahead, is_masked, 0)
    return rank


@triton.jit
def _turn_in_turn(
    word, masked_ptr, seed, block_start, step, L: tl.constexpr, L_PADDED: tl.constexpr, TAG: tl.constexpr
):
    """How many masked rows drew a smaller word than each row, from one rival after another."""
    offset = tl.arange(0, L_PADDED)
    zero = tl.zeros([1], tl.uint32)
    turn = tl.zeros([L_PADDED], tl.int32)
    for rival in range(L):
        at = zero + (block_start + rival).to(tl.uint32)
        rival_word, _1, _2, _3 = tl.philox(seed, zero, at, zero + step, zero + TAG)
        ahead = (rival_word < word) | ((rival_word == word) & (rival < offset))
        turn += tl.where(ahead, tl.load(masked_ptr + rival).to(tl.int32), 0)
    return turn


@triton.jit
def _choose(
    rule, parameter, score, masked, score_ptr, masked_ptr, seed_ptr, block_start, step, L: tl.constexpr,
    L_PADDED: tl.constexpr, COUNT_TAG: tl.constexpr, CHOICE_TAG: tl.constexpr,
):  # fmt: skip
    """Which rows of a block its rule fixes, from the scores of the masked ones; see RULES in unmask.py."""
    offset = tl.arange(0, L_PADDED)
    before = offset[None, :] < offset[:, None]
    rivals = masked[None, :]
    if L_PADDED <= LONGEST_PAIRED:
        ahead = rivals & ((score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & before))
        rank = tl.sum(ahead.to(tl.int32), 1)
    else:
        rank = _rank_in_turn(score, score_ptr, masked_ptr, L, L_PADDED)
    limit = tl.where(rule == ENTROPY, -parameter, parameter)
    chosen = (score >= limit) | (rank == 0)
    if rule == QUOTA:
        chosen = rank.to(tl.float32) < parameter
    if rule == DYNAMIC:
        fails = masked & (rank > 0) & (score < 1 - parameter / (rank + 2).to(tl.float32))
        chosen = rank < tl.min(tl.where(fails, rank, L), 0)
    if rule == RANDOM:
        seed = tl.load(seed_ptr)
        zero = tl.zeros([L_PADDED], tl.uint32)
        at_step = zero + step.to(tl.uint32)
        drawn, _1, _2, _3 = tl.philox(seed, zero, zero + block_start.to(tl.uint32), at_step, zero + COUNT_TAG)
        word, _4, _5, _6 = tl.philox(seed, zero, (block_start + offset).to(tl.uint32), at_step, zero + CHOICE_TAG)
        num_masked = tl.sum(masked.to(tl.int32), 0)
        wanted = 1 + tl.umulhi(drawn, zero + num_masked.to(tl.uint32)).to(tl.int32)
        if L_PADDED <= LONGEST_PAIRED:
            sooner = rivals & ((word[None, :] < word[:, None]) | ((word[None, :] == word[:, None]) & before))
            turn = tl.sum(sooner.to(tl.int32), 1)
        else:
            turn = _turn_in_turn(
                word, masked_ptr, seed, block_start, step.to(tl.uint32), L, L_PADDED, CHOICE_TAG
            )  # fmt: skip
        chosen = turn < wanted
    return chosen


@triton.jit
def _unmask_kernel(
    slots_ptr, token_ptr, score_ptr, finite_ptr, canvas_ptr, masked_ptr, done_ptr, ignore_eos_ptr, block_start_ptr,
    step_ptr, seed_ptr, parameter_ptr, rule_ptr, eos_ptr, record_ptr, canvas_stride,
    L: tl.constexpr, L_PADDED: tl.constexpr, NUM_EOS: tl.constexpr, COUNT_TAG: tl.constexpr,
    CHOICE_TAG: tl.constexpr, NONE: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span).to(tl.int64)
    offset = tl.arange(0, L_PADDED)
    inside = offset < L
    was_done = tl.load(done_ptr + slot).to(tl.int32) != 0
    masked = (tl.load(masked_ptr + slot * L + offset, mask=inside, other=0).to(tl.int32) != 0) & inside
    score = tl.load(score_ptr + span * L + offset, mask=masked, other=float("-inf"))
    token = tl.load(token_ptr + span * L + offset, mask=masked, other=0)
    finite = tl.load(finite_ptr + span * L + offset, mask=masked, other=1)
    block_start = tl.load(block_start_ptr + slot)
    step = tl.load(step_ptr + slot)
    rule = tl.load(rule_ptr + slot)
    bad = tl.min(tl.where(masked & (finite == 0), offset, L), 0)

    chosen = _choose(
        rule, tl.load(parameter_ptr + slot), score, masked, score_ptr + span * L, masked_ptr + slot * L,
        seed_ptr + slot, block_start, step, L, L_PADDED, COUNT_TAG, CHOICE_TAG,
    )  # fmt: skip
    may_change = tl.where(was_done | (bad < L), 0, 1)
    chosen = tl.where(masked, chosen.to(tl.int32) * may_change, 0) > 0

    here = canvas_ptr + slot * canvas_stride + block_start + offset
    ids = tl.where(chosen, token, tl.load(here, mask=inside, other=0))
    still_masked = masked & (chosen == 0)
    is_eos = offset < 0
    for number in tl.static_range(NUM_EOS):
        is_eos = is_eos | (ids == tl.load(eos_ptr + number))
    first_masked = tl.min(tl.where(still_masked, offset, L), 0)
    first_eos = tl.min(tl.where(is_eos & inside & (still_masked == 0), offset, L), 0)
    heeds_eos = tl.load(ignore_eos_ptr + slot).to(tl.int32) == 0
    done = was_done | (first_masked == L) | ((first_eos < first_masked) & heeds_eos) | (bad < L)
    record = record_ptr + span * (L + EXTRA)
    tl.store(record + offset, tl.where(chosen, token, NONE), mask=inside)
    tl.store(record + L, done.to(tl.int32))
    tl.store(record + L + 1, was_done.to(tl.int32))
    tl.store(record + L + 2, tl.where((bad < L) & (was_done == 0), block_start + bad, -1))
    if was_done == 0:
        tl.store(here, ids, mask=chosen)
        tl.store(masked_ptr + slot * L + offset, still_masked, mask=inside)
        tl.store(done_ptr + slot, done)
        tl.store(step_ptr + slot, step + 1)


def unmask(slots_B: Tensor, proposals: ProposalBuffers, slots: SlotTable, eos_ids: Tensor, record_BX: Tensor) -> None:
    """Apply the rule of every block, fix its tokens, and note the step in `record_BX` [B, L + RECORD_EXTRA], int32.

    Mutates the canvas, masks, done flags and steps of `slots`, but for blocks that had ended. Does not wait.
    """
    length = slots.masked_SL.shape[1]
    _unmask_kernel[(len(slots_B),)](
        slots_B, proposals.token_BL, proposals.score_BL, proposals.is_finite_BL, slots.canvas_SC, slots.masked_SL,
        slots.done_S, slots.ignore_eos_S, slots.block_start_S, slots.step_S, slots.seed_S, slots.parameter_S,
        slots.rule_S, eos_ids, record_BX, slots.canvas_SC.stride(0),
        L=length, L_PADDED=triton.next_power_of_2(length), NUM_EOS=len(eos_ids), COUNT_TAG=int(Tag.COUNT),
        CHOICE_TAG=int(Tag.CHOICE), NONE=NOT_FIXED, EXTRA=RECORD_EXTRA, num_warps=4,
    )  # fmt: skip
