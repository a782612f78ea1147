"""Attention of short spans over paged keys and values: split over the keys, then combined.

A span has a few dozen query rows (a block) and thousands of keys (its canvas), so reading K and V once is the cost.
One program reads one chunk of keys of one sequence and KV head for a tile of query rows; the heads of a group share
the tile. Of the programs that share a sequence, head and tile, the last to end combines their results. Everything
they need to know lies on the device, so a captured launch serves every batch of its size.

The algorithm is split-K flash decoding (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference",
2023). Shapes: B spans, M query rows of a span, H query heads, K KV heads, G = H / K, D head dim, Q = M x G query
rows of a KV head, Z chunks, N most pages of a canvas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dbench.serve.kernels.overlap import overlap_options, wait_for_kernels_before

LOG2_E = 1.4426950408889634


FEWEST_KEYS_PER_CHUNK = 256
"""Of the longest canvas: shorter chunks cost more in combining than they bring."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The sizes of a launch that its speed depends on."""

    num_spans: int
    queries: int
    """Query rows of one KV head: rows x heads of its group."""
    kv_heads: int
    bytes_per_key_head: int
    longest: int
    """Keys, at most."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work of a launch is cut; a matter of speed alone."""

    num_chunks: int
    """Parts that the keys of every sequence are cut into."""
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    values_first: bool
    """Ask for the values of a step before its scores are known: less waiting, more registers."""


def choose_tiling(shape: LaunchShape, device: torch.device) -> Tiling:
    """What was fastest on an H200 for such a launch (benchmarks/attention.py), cut down where memory is smaller."""
    limits = _DeviceLimits.of(device)

    def programs(block_m: int) -> int:
        return shape.num_spans * shape.kv_heads * triton.cdiv(shape.queries, block_m)

    if shape.queries <= 64 or programs(64) <= limits.num_processors:
        block_m = next(m for m in (16, 32, 64) if shape.queries <= m or m == 64)
        block_n, num_warps = 128, 4
    else:
        block_m, block_n, num_warps = 128, 128, 8
    num_stages = 2 if block_m <= 32 and programs(block_m) > limits.num_processors else 3
    while (2 * num_stages * block_n + block_m) * shape.bytes_per_key_head > limits.shared_memory and block_m > 16:
        # keys and values of every stage, and the queries
        if block_n > 16:
            block_n //= 2
        elif num_stages > 2:
            num_stages -= 1
        else:
            block_m //= 2
    num_programs = programs(block_m)
    num_chunks = max(1, min(limits.num_processors // num_programs, shape.longest // FEWEST_KEYS_PER_CHUNK))
    values_first = block_m > 32 or num_programs <= limits.num_processors
    return Tiling(num_chunks, block_m, block_n, num_warps, num_stages, values_first)


def counts_to_compile(tilings: Mapping[tuple[int, int], Tiling]) -> tuple[int, ...]:
    """Numbers of spans whose launches are between them compiled to everything that `tilings` asks for.

    `tilings`: (spans, rows of each) -> how that launch is cut. A kernel is compiled at the first launch that needs it,
    for a second or so: better before work comes.
    """
    first: dict[tuple[int, Tiling], int] = {}
    for (num_spans, num_rows), tiling in tilings.items():
        kind = num_rows, replace(tiling, num_chunks=min(tiling.num_chunks, 2))  # split or not: how often is no matter
        first[kind] = min(num_spans, first.get(kind, num_spans))
    return tuple(sorted(set(first.values())))


@dataclass(frozen=True, slots=True)
class _DeviceLimits:
    num_processors: int
    shared_memory: int
    """Bytes that a program may use."""

    @staticmethod
    def of(device: torch.device) -> _DeviceLimits:
        """Of a CUDA device; Triton's interpreter, which runs on the CPU, has none to speak of."""
        if device.type != "cuda":
            return _DeviceLimits(8, 1 << 30)
        properties = torch.cuda.get_device_properties(device)
        optin = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # which the stubs lack
        return _DeviceLimits(properties.multi_processor_count, optin)


@triton.jit
def _keys(first, end, BLOCK_N: tl.constexpr):
    """The keys of a step; the last one repeats where there are no more."""
    return tl.minimum(first + tl.arange(0, BLOCK_N), end - 1)


@triton.jit
def _attend(
    q, key_ptr, value_ptr, head_at, page, first, end, scale_log2, place_stride, mixed, total, largest,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, IS_PARTIAL: tl.constexpr, VALUES_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take BLOCK_N keys from `first` on into the running result; with IS_PARTIAL only those before `end`."""
    place = (page * PAGE_SIZE + _keys(first, end, BLOCK_N) % PAGE_SIZE) * place_stride
    k = tl.load(key_ptr + place[:, None] + head_at[None, :])
    if VALUES_FIRST:
        v = tl.load(value_ptr + place[:, None] + head_at[None, :])
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if IS_PARTIAL:
        score = tl.where((first + tl.arange(0, BLOCK_N) < end)[None, :], score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - new_largest[:, None])
    fade = tl.exp2(largest - new_largest)
    total = total * fade + tl.sum(weight, 1)
    if not VALUES_FIRST:
        v = tl.load(value_ptr + place[:, None] + head_at[None, :])
    mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None], input_precision=PRECISION)
    return mixed, total, new_largest


@triton.jit
def _attend_to_chunk(
    q, key_ptr, value_ptr, pages_ptr, head_at, first_key, end, scale_log2, place_stride,
    BLOCK_M: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weighted sum of the values from `first_key` to `end`, sum of the weights, and the largest score."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    whole_end = first_key + (end - first_key) // BLOCK_N * BLOCK_N
    page = tl.load(pages_ptr + _keys(first_key, end, BLOCK_N) // PAGE_SIZE).to(tl.int64)
    for first in range(first_key, whole_end, BLOCK_N):
        next_page = tl.load(pages_ptr + _keys(first + BLOCK_N, end, BLOCK_N) // PAGE_SIZE).to(tl.int64)
        mixed, total, largest = _attend(
            q, key_ptr, value_ptr, head_at, page, first, end, scale_log2, place_stride, mixed, total, largest,
            PAGE_SIZE, BLOCK_N, False, VALUES_FIRST, PRECISION,
        )  # fmt: skip
        page = next_page  # a step early, so that keys need not wait for it
    if whole_end < end:
        mixed, total, largest = _attend(
            q, key_ptr, value_ptr, head_at, page, whole_end, end, scale_log2, place_stride, mixed, total, largest,
            PAGE_SIZE, BLOCK_N, True, VALUES_FIRST, PRECISION,
        )  # fmt: skip
    return mixed, total, largest


@triton.jit
def _combined(
    part_ptr, part_lse_ptr, part_at, num_parts, PART_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attention over all keys from that over each chunk and the logarithm of its weights' sum."""
    column = tl.arange(0, D)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    for number in range(num_parts):
        there = part_at + number * PART_STRIDE
        lse = tl.load(part_lse_ptr + there, cache_modifier=".cg")  # not from a cache that other processors leave stale
        piece = tl.load(part_ptr + there[:, None] * D + column[None, :], cache_modifier=".cg")
        new_largest = tl.maximum(largest, lse)
        weight, fade = tl.exp2(lse - new_largest), tl.exp2(largest - new_largest)
        mixed = mixed * fade[:, None] + piece * weight[:, None]
        total = total * fade + weight
        largest = new_largest
    return mixed / total[:, None]


@triton.jit(do_not_specialize=["num_chunks"])
def _span_attention_kernel(
    q_ptr, key_ptr, value_ptr, pages_ptr, slots_ptr, lengths_ptr, out_ptr, part_ptr, part_lse_ptr, counter_ptr,
    scale_log2, q_stride, place_stride, pages_stride, num_chunks,
    M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, VALUES_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(OVERLAPS)
    G: tl.constexpr = H // K
    TILES: tl.constexpr = (M * G + BLOCK_M - 1) // BLOCK_M
    head, tile = tl.program_id(0) % K, tl.program_id(0) // K
    chunk, span = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + span).to(tl.int64)
    num_keys = tl.load(lengths_ptr + slot).to(tl.int32)
    keys_per_chunk = tl.cdiv(tl.cdiv(num_keys, num_chunks), BLOCK_N) * BLOCK_N
    first_key = chunk * keys_per_chunk
    if first_key >= num_keys:
        return
    end = tl.minimum(first_key + keys_per_chunk, num_keys)

    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    has_query = query < M * G
    row, q_head = span * M + query // G, head * G + query % G
    column = tl.arange(0, D)
    q = tl.load(
        q_ptr + row.to(tl.int64)[:, None] * q_stride + q_head[:, None] * D + column[None, :],
        mask=has_query[:, None], other=0.0,
    )  # fmt: skip
    mixed, total, largest = _attend_to_chunk(
        q, key_ptr, value_ptr, pages_ptr + slot * pages_stride, head * D + column, first_key, end, scale_log2,
        place_stride, BLOCK_M, D, PAGE_SIZE, BLOCK_N, VALUES_FIRST, PRECISION,
    )  # fmt: skip
    out_at = (row.to(tl.int64) * H + q_head)[:, None] * D + column[None, :]
    if not IS_SPLIT:
        result = mixed / total[:, None]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=has_query[:, None])
        return

    CHUNK_STRIDE: tl.constexpr = K * TILES * BLOCK_M
    part_at = span.to(tl.int64) * num_chunks * CHUNK_STRIDE + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = part_at + chunk * CHUNK_STRIDE
    tl.store(part_ptr + here[:, None] * D + column[None, :], mixed / total[:, None])
    tl.store(part_lse_ptr + here, largest + tl.log2(total))
    tl.debug_barrier()  # all of the program's stores, before one of its threads tells of them
    counter = counter_ptr + span * (K * TILES) + tl.program_id(0)
    num_used = tl.cdiv(num_keys, keys_per_chunk)
    if tl.atomic_add(counter, 1, sem="acq_rel") < num_used - 1:
        return
    tl.store(counter, 0)  # the last chunk to arrive combines them all
    result = _combined(part_ptr, part_lse_ptr, part_at, num_used, CHUNK_STRIDE, BLOCK_M, D)
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=has_query[:, None])


@dataclass(frozen=True, slots=True)
class SpanKeys:
    """Whose keys the spans of a launch read."""

    slots_B: Tensor
    pages_SN: Tensor
    lengths_S: Tensor
    """Keys of each slot, at least 1."""
    page_size: int


class SpanAttention:
    """Attention of launches with up to `num_spans` spans of M rows; owns the room for partial results."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._parts: Tensor | None = None
        self._lse: Tensor | None = None
        self._counters: Tensor | None = None

    def reserve(self, num_spans: int, num_rows: int, tiling: Tiling, device: torch.device) -> None:
        """Room for a launch of this size; a later call never makes it smaller."""
        num_programs = num_spans * self._kv_heads * triton.cdiv(self._queries(num_rows), tiling.block_m)
        num_parts = num_programs * tiling.num_chunks * tiling.block_m
        if tiling.num_chunks == 1:
            return
        if self._lse is None or len(self._lse) < num_parts:
            self._parts = torch.empty(num_parts, self._head_dim, dtype=torch.float32, device=device)
            self._lse = torch.empty(num_parts, dtype=torch.float32, device=device)
        if self._counters is None or len(self._counters) < num_programs:
            self._counters = torch.zeros(num_programs, dtype=torch.int32, device=device)

    def run(self, q_RHD: Tensor, kv_2PKD: Tensor, keys: SpanKeys, tiling: Tiling, out_RF: Tensor) -> None:
        """Every span's rows over all keys of its slot, [B x M, H, D] -> [B x M, H x D]. Does not wait.

        `kv_2PKD` [2, places, K, D] is one layer; `reserve` has been called for a launch of this size.
        """
        heads, kv_heads, head_dim = self._heads, self._kv_heads, self._head_dim
        num_spans, num_rows = len(keys.slots_B), len(q_RHD) // len(keys.slots_B)
        is_split = tiling.num_chunks > 1
        parts, lse, counters = (self._parts, self._lse, self._counters) if is_split else (out_RF, out_RF, out_RF)
        tiles = triton.cdiv(self._queries(num_rows), tiling.block_m)
        _span_attention_kernel[(kv_heads * tiles, tiling.num_chunks, num_spans)](
            q_RHD, kv_2PKD[0], kv_2PKD[1], keys.pages_SN, keys.slots_B, keys.lengths_S, out_RF, parts, lse, counters,
            LOG2_E / math.sqrt(head_dim), q_RHD.stride(0), kv_2PKD.stride(1), keys.pages_SN.stride(0),
            tiling.num_chunks, M=num_rows, H=heads, K=kv_heads, D=head_dim, PAGE_SIZE=keys.page_size,
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, IS_SPLIT=is_split, VALUES_FIRST=tiling.values_first,
            PRECISION="ieee" if q_RHD.dtype == torch.float32 else "tf32",
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **overlap_options(q_RHD.device),
        )  # fmt: skip

    def _queries(self, num_rows: int) -> int:
        """Query rows of one KV head."""
        return num_rows * self._heads // self._kv_heads
