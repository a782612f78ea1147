"""Attention of short spans over paged keys and values: split over the keys, then combined.

A span has a few dozen query rows (a block) and thousands of keys (its canvas), so reading K and V once is the cost.
One program reads one chunk of keys of one sequence and KV head for a tile of query rows; the heads of a group share
the tile. Everything it needs to know lies on the device, so a captured launch serves every batch of its size.

The algorithm is split-K flash decoding (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference",
2023). Shapes: B spans, M query rows of a span, H query heads, K KV heads, G = H / K, D head dim, Q = M x G query
rows of a KV head, Z chunks, N most pages of a canvas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


NUM_STAGES = 2


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

    keys_per_chunk: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiling(shape: LaunchShape, device: torch.device) -> Tiling:
    """What was fastest on an H200 for such a launch (benchmarks/attention.py), cut down where memory is smaller."""
    block_m = next((m for m in (16, 32, 64) if shape.queries <= m), 64 if shape.num_spans == 1 else 128)
    block_n = 64 if block_m == 128 else 128
    while 2 * NUM_STAGES * block_n * shape.bytes_per_key_head > _shared_memory(device) * 3 // 4:
        block_n //= 2
    programs = shape.num_spans * shape.kv_heads * triton.cdiv(shape.queries, block_m)
    keys_per_chunk = 512 if programs <= 32 else 1024 if programs <= 128 else shape.longest
    return Tiling(keys_per_chunk, block_m, max(16, block_n), 4, NUM_STAGES)


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; without end in Triton's interpreter, which runs on the CPU."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@triton.jit(do_not_specialize=["num_chunks", "keys_per_chunk"])
def _span_attention_kernel(
    q_ptr, key_ptr, value_ptr, pages_ptr, slots_ptr, lengths_ptr, out_ptr, part_ptr, part_lse_ptr,
    scale_log2, q_stride, place_stride, pages_stride, num_chunks, keys_per_chunk,
    M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // K
    TILES: tl.constexpr = (M * G + BLOCK_M - 1) // BLOCK_M
    head, tile = tl.program_id(0) % K, tl.program_id(0) // K
    chunk, span = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + span).to(tl.int64)
    num_keys = tl.load(lengths_ptr + slot)
    first_key = chunk * keys_per_chunk
    if first_key >= num_keys:
        return
    last_key = tl.minimum(first_key + keys_per_chunk, num_keys)

    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    has_query = query < M * G
    row, q_head = span * M + query // G, head * G + query % G
    column = tl.arange(0, D)
    q = tl.load(
        q_ptr + row.to(tl.int64)[:, None] * q_stride + q_head[:, None] * D + column[None, :],
        mask=has_query[:, None], other=0.0,
    )  # fmt: skip
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    pages_ptr += slot * pages_stride
    head_at = head * D + column
    for first in range(first_key, last_key, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        near = tl.minimum(key, num_keys - 1)
        page = tl.load(pages_ptr + near // PAGE_SIZE).to(tl.int64)
        place = (page * PAGE_SIZE + near % PAGE_SIZE) * place_stride
        k = tl.load(key_ptr + place[:, None] + head_at[None, :])
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        score = tl.where((key < last_key)[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(value_ptr + place[:, None] + head_at[None, :])
        mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None], input_precision=PRECISION)
        largest = new_largest
    mixed = mixed / total[:, None]
    if IS_SPLIT:
        at = (span * num_chunks + chunk).to(tl.int64) * (K * TILES * BLOCK_M) + tl.program_id(0) * BLOCK_M
        at = at + tl.arange(0, BLOCK_M)
        tl.store(part_ptr + at[:, None] * D + column[None, :], mixed.to(part_ptr.dtype.element_ty))
        tl.store(part_lse_ptr + at, largest + tl.log2(total))
    else:
        tl.store(
            out_ptr + (row.to(tl.int64) * H + q_head)[:, None] * D + column[None, :],
            mixed.to(out_ptr.dtype.element_ty), mask=has_query[:, None],
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_chunks", "keys_per_chunk"])
def _combine_kernel(
    part_ptr, part_lse_ptr, slots_ptr, lengths_ptr, out_ptr, num_chunks, keys_per_chunk,
    M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // K
    TILES: tl.constexpr = (M * G + BLOCK_M - 1) // BLOCK_M
    head, part, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + span).to(tl.int64)
    used_chunks = tl.cdiv(tl.load(lengths_ptr + slot), keys_per_chunk)
    query = part * QUERIES + tl.arange(0, QUERIES)
    has_query = query < M * G
    column = tl.arange(0, D)
    at = (query // BLOCK_M * K + head) * BLOCK_M + query % BLOCK_M
    at = (span * num_chunks).to(tl.int64) * (K * TILES * BLOCK_M) + at
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, D], tl.float32)
    for _ in range(used_chunks):
        lse = tl.load(part_lse_ptr + at, mask=has_query, other=0.0)
        new_largest = tl.maximum(largest, lse)
        weight, fade = tl.exp2(lse - new_largest), tl.exp2(largest - new_largest)
        piece = tl.load(part_ptr + at[:, None] * D + column[None, :], mask=has_query[:, None], other=0.0)
        mixed = mixed * fade[:, None] + piece.to(tl.float32) * weight[:, None]
        total = total * fade + weight
        largest = new_largest
        at += K * TILES * BLOCK_M
    row = (span * M + query // G).to(tl.int64)
    tl.store(
        out_ptr + (row * H + head * G + query % G)[:, None] * D + column[None, :],
        (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=has_query[:, None],
    )  # fmt: skip


COMBINED_QUERIES = 16


@dataclass(frozen=True, slots=True)
class SpanKeys:
    """Whose keys the spans of a launch read."""

    slots_B: Tensor
    pages_SN: Tensor
    lengths_S: Tensor
    """Keys of each slot, at least 1."""
    longest: int
    """No slot has more."""
    page_size: int


class SpanAttention:
    """Attention of launches with up to `num_spans` spans of M rows; owns the room for partial results."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._parts: Tensor | None = None
        self._lse: Tensor | None = None

    def reserve(self, num_spans: int, num_rows: int, longest: int, tiling: Tiling, device: torch.device) -> None:
        """Room for a launch of this size; a later call never makes it smaller."""
        chunks = triton.cdiv(longest, tiling.keys_per_chunk)
        if chunks == 1:
            return
        queries = num_rows * self._heads // self._kv_heads
        num_parts = num_spans * chunks * self._kv_heads * triton.cdiv(queries, tiling.block_m) * tiling.block_m
        if self._lse is None or len(self._lse) < num_parts:
            self._parts = torch.empty(num_parts, self._head_dim, dtype=torch.float32, device=device)
            self._lse = torch.empty(num_parts, dtype=torch.float32, device=device)

    def run(self, q_RHD: Tensor, kv_2PKD: Tensor, keys: SpanKeys, tiling: Tiling, out_RF: Tensor) -> None:
        """Every span's rows over all keys of its slot, [B x M, H, D] -> [B x M, H x D]. Does not wait.

        `kv_2PKD` [2, places, K, D] is one layer; `reserve` has been called for a launch of this size.
        """
        heads, kv_heads, head_dim = self._heads, self._kv_heads, self._head_dim
        num_spans, num_rows = len(keys.slots_B), len(q_RHD) // len(keys.slots_B)
        queries = num_rows * heads // kv_heads
        chunks = triton.cdiv(keys.longest, tiling.keys_per_chunk)
        parts, lse = (out_RF, out_RF) if self._parts is None or self._lse is None else (self._parts, self._lse)
        _span_attention_kernel[(kv_heads * triton.cdiv(queries, tiling.block_m), chunks, num_spans)](
            q_RHD, kv_2PKD[0], kv_2PKD[1], keys.pages_SN, keys.slots_B, keys.lengths_S, out_RF, parts, lse,
            LOG2_E / math.sqrt(head_dim), q_RHD.stride(0), kv_2PKD.stride(1), keys.pages_SN.stride(0), chunks,
            tiling.keys_per_chunk, M=num_rows, H=heads, K=kv_heads, D=head_dim, PAGE_SIZE=keys.page_size,
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, IS_SPLIT=chunks > 1,
            PRECISION="ieee" if q_RHD.dtype == torch.float32 else "tf32",
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
        if chunks > 1:
            _combine_kernel[(kv_heads, triton.cdiv(queries, COMBINED_QUERIES), num_spans)](
                parts, lse, keys.slots_B, keys.lengths_S, out_RF, chunks, tiling.keys_per_chunk,
                M=num_rows, H=heads, K=kv_heads, D=head_dim, BLOCK_M=tiling.block_m,
                QUERIES=COMBINED_QUERIES, num_warps=4,
            )  # fmt: skip
