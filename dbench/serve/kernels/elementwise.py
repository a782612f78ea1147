"""Kernels that read and write every row once: normalisation, rotary positions with the page write, the gated MLP.

Shapes: T packed rows, E d_model, H query heads, K KV heads, X = H + 2 K heads side by side (query, key, value),
D head dim, M MLP hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dbench.serve.kernels.overlap import overlap_options, wait_for_kernels_before

HEADS_PER_PROGRAM = 8
GATE_WIDTH = 2048


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, E: tl.constexpr, E_PADDED: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_kernels_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, E_PADDED)
    inside = column < E
    x = tl.load(x_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor) -> None:
    """x / sqrt(mean(x^2) + eps) x weight of every row, computed in float32, into `out_TE`."""
    width = x_TE.shape[1]
    _rms_norm_kernel[(len(x_TE),)](
        x_TE, weight_E, out_TE, eps, E=width, E_PADDED=triton.next_power_of_2(width), num_warps=8,
        **overlap_options(x_TE.device),
    )  # fmt: skip


@triton.jit
def _rotate_kernel(
    x_ptr, bias_ptr, position_ptr, place_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, x_stride, place_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, FIRST_HEAD: tl.constexpr,
    LAST_HEAD: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    head = FIRST_HEAD + tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < LAST_HEAD) & (column < HALF)
    position = tl.load(position_ptr + row)
    cos = tl.load(cos_ptr + position * HALF + column)
    sin = tl.load(sin_ptr + position * HALF + column)
    at = (head - FIRST_HEAD) * D + column
    low = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + row * x_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias_ptr + head * D + column, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias_ptr + head * D + column + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = head < H + K
    new_low = tl.where(turns, low * cos - high * sin, low).to(x_ptr.dtype.element_ty)
    new_high = tl.where(turns, high * cos + low * sin, high).to(x_ptr.dtype.element_ty)
    changed = inside & (turns | HAS_BIAS)
    tl.store(x_ptr + row * x_stride + at, new_low, mask=changed)
    tl.store(x_ptr + row * x_stride + at + HALF, new_high, mask=changed)
    if LAST_HEAD > H:
        place = tl.load(place_ptr + row) * place_stride
        is_key, is_value = inside & (head >= H) & turns, inside & (head >= H + K)
        at_key, at_value = place + (head - H) * D + column, place + (head - H - K) * D + column
        tl.store(key_ptr + at_key, new_low, mask=is_key)
        tl.store(key_ptr + at_key + HALF, new_high, mask=is_key)
        tl.store(value_ptr + at_value, new_low, mask=is_value)
        tl.store(value_ptr + at_value + HALF, new_high, mask=is_value)


class Rotary:
    """Rotary angles of every position, and the heads that they turn."""

    def __init__(self, cos_CD: Tensor, sin_CD: Tensor, num_heads: int, num_kv_heads: int) -> None:
        """`cos_CD`, `sin_CD`: float32 [positions, D / 2]."""
        self._cos, self._sin = cos_CD, sin_CD
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._head_dim = 2 * cos_CD.shape[1]

    def turn_and_store(
        self, qkv_TXD: Tensor, bias_F: Tensor | None, positions_T: Tensor, places_T: Tensor, kv_2PKD: Tensor
    ) -> None:
        """Add the bias, turn queries and keys in place, and write keys and values to their places.

        `qkv_TXD` holds all X heads, or the 2 K of keys and values alone; `kv_2PKD` [2, places, K, D] is one layer.
        """
        first_head = self._num_heads + 2 * self._num_kv_heads - qkv_TXD.shape[1]
        assert first_head in (0, self._num_heads), f"{qkv_TXD.shape[1]} heads are neither all nor keys and values"
        self._run(qkv_TXD, bias_F, positions_T, places_T, kv_2PKD, first_head)

    def turn_queries(self, q_RHD: Tensor, bias_F: Tensor | None, positions_R: Tensor) -> None:
        """Add the bias and turn queries in place."""
        self._run(q_RHD, bias_F, positions_R, positions_R, None, 0)

    def _run(
        self, x: Tensor, bias_F: Tensor | None, positions: Tensor, places: Tensor, kv: Tensor | None, first_head: int
    ) -> None:  # fmt: skip
        heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(x.shape[1]))
        key, value = (x, x) if kv is None else (kv[0], kv[1])
        _rotate_kernel[(len(x), triton.cdiv(x.shape[1], heads))](
            x, x if bias_F is None else bias_F, positions, places, self._cos, self._sin, key, value,
            x.stride(0), key.stride(0),
            H=self._num_heads, K=self._num_kv_heads, D=self._head_dim, HEADS=heads, FIRST_HEAD=first_head,
            LAST_HEAD=first_head + x.shape[1], HAS_BIAS=bias_F is not None, num_warps=4,
            **overlap_options(x.device),
        )  # fmt: skip


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, M: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_kernels_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < M
    gate = tl.load(gate_up_ptr + row * 2 * M + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * M + M + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * M + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_times(gate_up_TM: Tensor, out_TM: Tensor) -> None:
    """silu(gate) x up of rows that hold gate and up side by side, [T, 2 M] -> [T, M], computed in float32."""
    width = out_TM.shape[1]
    _gate_kernel[(len(out_TM), triton.cdiv(width, GATE_WIDTH))](
        gate_up_TM, out_TM, M=width, WIDTH=GATE_WIDTH, num_warps=8, **overlap_options(out_TM.device)
    )
