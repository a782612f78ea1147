"""The attention of refreshes that needs no FlashInfer, and when FlashInfer cannot serve."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dbench.errors import OptionError
from dbench.models import size_directory
from dbench.serve import refresh_attention
from dbench.serve.families import ModelConfig, read_model_config
from dbench.serve.refresh_attention import SdpaRagged, choose_backend, flashinfer_fault

CPU = torch.device("cpu")


def model(heads: int, kv_heads: int, head_dim: int = 16) -> ModelConfig:
    config = read_model_config(size_directory("dream-tiny"))
    return replace(config, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim)


def by_hand(q_HD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """One row, head by head."""
    group = len(q_HD) // k_TKD.shape[1]
    heads = []
    for head, q_D in enumerate(q_HD):
        weight_T = (k_TKD[:, head // group] @ q_D / q_D.shape[0] ** 0.5).softmax(0)
        heads.append(weight_T @ v_TKD[:, head // group])
    return torch.stack(heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_row_sees_every_row_of_its_own_span_and_no_other(heads: int, kv_heads: int) -> None:
    lengths = (5, 1, 9)
    qkv_TXD = torch.randn(sum(lengths), heads + 2 * kv_heads, 16, generator=torch.Generator().manual_seed(1))
    q, k, v = torch.split(qkv_TXD, [heads, kv_heads, kv_heads], dim=1)
    out_THD = torch.full((sum(lengths), heads, 16), torch.nan)
    attention = SdpaRagged(model(heads, kv_heads), torch.float32, CPU)
    attention.plan(lengths)
    attention.run(q, k, v, out_THD)
    first = 0
    for length in lengths:
        own = slice(first, first + length)
        wanted = torch.stack([by_hand(row_HD, k[own], v[own]) for row_HD in q[own]])
        torch.testing.assert_close(out_THD[own], wanted)
        first += length


@pytest.mark.parametrize(
    ("is_installed", "dtype", "head_dim", "capability", "fault"),
    [
        (False, torch.bfloat16, 128, (9, 0), "not installed"),
        (True, torch.float32, 128, (9, 0), "not float32"),
        (True, torch.bfloat16, 16, (9, 0), "head dim of 16"),
        (True, torch.float16, 128, (7, 5), "compute capability 8.0, this device has 7.5"),
        (True, torch.bfloat16, 64, (8, 0), ""),
    ],
)
def test_what_keeps_flashinfer_from_serving(
    is_installed: bool,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refresh_attention, "find_spec", lambda _: object() if is_installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(refresh_attention, "try_flashinfer", lambda *_: None)
    found = flashinfer_fault(model(2, 2, head_dim), dtype, torch.device("cuda", 0))
    assert fault in found
    assert bool(found) == bool(fault)


@pytest.fixture
def broken_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("ninja failed:\nnvcc: not found")

    monkeypatch.setattr(refresh_attention, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(refresh_attention, "try_flashinfer", no_compiler)


@pytest.mark.usefixtures("broken_flashinfer")
def test_a_flashinfer_that_does_not_run_gives_way_to_sdpa_unless_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = (model(2, 2, 128), torch.bfloat16, torch.device("cuda", 0))
    with caplog.at_level(logging.INFO):
        assert choose_backend("auto", *given) == "sdpa"
    assert "sdpa, because flashinfer does not run here: ninja failed: nvcc: not found" in caplog.text
    with pytest.raises(OptionError, match=r"^--attention-backend flashinfer: flashinfer does not run here"):
        choose_backend("flashinfer", *given)


@pytest.mark.usefixtures("broken_flashinfer")
def test_sdpa_is_not_questioned() -> None:
    assert choose_backend("sdpa", model(2, 2, 128), torch.bfloat16, torch.device("cuda", 0)) == "sdpa"
