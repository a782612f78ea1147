"""Attention of refresh spans on CUDA, whose queries, keys and values all lie in the packed rows.

Shapes: T packed rows of all refresh spans, one span after another, H query heads, K KV heads, D head dim. A row
sees every row of its own span. A table of backends; each is planned once per batch and run in every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dbench.errors import OptionError, one_line
from dbench.serve.families import ModelConfig

WORKSPACE_BYTES = 128 << 20
FLASHINFER_HEAD_DIMS = (64, 128, 256)
TRIED_ROWS = 16
MAX_REASON = 200
"""Characters of a foreign error that are shown."""
NUM_PLANS = 2
"""A plan is copied to the device from a pinned buffer of its own while the batch before may still be copying its."""

logger = logging.getLogger(__name__)


class RefreshAttention(Protocol):
    """Plans and runs the attention of the refresh spans of one batch at a time."""

    name: str

    def plan(self, lengths: Sequence[int]) -> None:
        """Rows of each span. Does not wait for the device."""

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor) -> None:
        """Attention of the planned spans into `out_THD`. Does not wait for the device."""


class FlashInferRagged:
    """FlashInfer's ragged prefill kernel."""

    name = "flashinfer"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self._config, self._dtype = config, dtype
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: list[Any] = [BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD") for _ in range(NUM_PLANS)]

    def plan(self, lengths: Sequence[int]) -> None:
        self._wrappers.append(self._wrappers.pop(0))
        config = self._config
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._wrappers[0].plan(
            bounds, bounds, config.n_heads, config.n_kv_heads, config.head_dim,
            causal=False, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor) -> None:
        self._wrappers[0].run(q_THD, k_TKD, v_TKD, out=out_THD)


class SdpaRagged:
    """torch's scaled_dot_product_attention, one call per span."""

    name = "sdpa"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._group = config.n_heads // config.n_kv_heads
        self._lengths: Sequence[int] = ()

    def plan(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor) -> None:
        first = 0
        for length in self._lengths:
            rows = slice(first, first + length)
            per_head = (q_THD[rows], self._repeated(k_TKD[rows]), self._repeated(v_TKD[rows]))
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in per_head)
            attended = scaled_dot_product_attention(q, k, v)
            out_THD[rows].copy_(attended[0].transpose(0, 1))
            first += length

    def _repeated(self, x_TKD: Tensor) -> Tensor:
        """[T, K, D] -> [T, H, D], each head as often as queries share it.

        Without it torch computes grouped heads on cards before Ampere, and float32 anywhere, with a matrix of all
        scores: 1.9 GB for 28 heads and 4,096 rows.
        """
        if self._group == 1:
            return x_TKD
        return x_TKD.unsqueeze(2).expand(-1, -1, self._group, -1).flatten(1, 2)


REFRESH_BACKENDS: dict[str, Callable[[ModelConfig, torch.dtype, torch.device], RefreshAttention]] = {
    "flashinfer": FlashInferRagged,
    "sdpa": SdpaRagged,
}
"""attention_backend -> its maker."""


def choose_backend(wanted: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The attention of refreshes, said in the log. Raises OptionError where FlashInfer is wanted and cannot serve."""
    if wanted == "sdpa":
        logger.info("attention of refreshes: sdpa, as asked")
        return wanted
    fault = flashinfer_fault(config, dtype, device)
    if wanted == "flashinfer" and fault:
        raise OptionError(f"--attention-backend flashinfer: {fault}; take sdpa, or auto")
    backend = "sdpa" if fault else "flashinfer"
    logger.info("attention of refreshes: %s%s", backend, f", because {fault}" if fault else "")
    return backend


def flashinfer_fault(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why FlashInfer cannot serve this model here; empty if it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'dbench[cuda]')"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flashinfer computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"flashinfer has no kernel for a head dim of {config.head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"flashinfer needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    try:
        try_flashinfer(config, dtype, device)
    except Exception as error:  # foreign code that compiles itself: whatever it lacks, sdpa does without
        return f"flashinfer does not run here: {one_line(error)[:MAX_REASON]}"
    return ""


def try_flashinfer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Plan and run a few rows, which compiles the kernels where that has not been done."""
    backend = FlashInferRagged(config, dtype, device)
    backend.plan([TRIED_ROWS])
    heads = config.n_heads + 2 * config.n_kv_heads
    qkv_THD = torch.zeros(TRIED_ROWS, heads, config.head_dim, dtype=dtype, device=device)
    q_THD, k_THD, v_THD = qkv_THD.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=1)
    backend.run(
        q_THD, k_THD, v_THD, torch.empty(TRIED_ROWS, config.n_heads, config.head_dim, dtype=dtype, device=device)
    )
    torch.cuda.synchronize(device)
