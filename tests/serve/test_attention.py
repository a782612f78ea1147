"""Every attention backend gives what plain softmax attention over each sequence's own keys gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dbench.serve.attention import ATTENTION_BACKENDS, SequenceLayout
from dbench.serve.families import read_model_config
from dbench.serve.kv import KvPool
from tests.serve.checkpoints import write_checkpoint

PAGE = 4


def plain_attention(q_LHD: Tensor, k_KGD: Tensor, v_KGD: Tensor) -> Tensor:
    """One sequence, head by head; query head h reads KV head h // (H / G)."""
    heads, shared = q_LHD.shape[1], q_LHD.shape[1] // k_KGD.shape[1]
    outputs = []
    for head in range(heads):
        scores = q_LHD[:, head] @ k_KGD[:, head // shared].T / math.sqrt(q_LHD.shape[2])
        outputs.append(scores.softmax(dim=-1) @ v_KGD[:, head // shared])
    return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_packed_sequences_equal_plain_attention_each(tmp_path: Path, name: str, n_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    config = read_model_config(write_checkpoint(tmp_path, {}, 1, n_kv_heads=n_kv_heads))
    kv = KvPool(config, num_pages=20, page_size=PAGE, like=torch.zeros(1))
    everything = torch.arange(20 * PAGE)
    nothing = torch.full((20 * PAGE, n_kv_heads, 8), torch.nan)
    kv.write(1, nothing, nothing, everything)  # whoever reads beyond, shows it
    free = torch.randperm(20, generator=generator)
    layout, wanted, queries = [], [], []
    for num_rows, num_keys in ((1, 1), (8, 17), (13, 13), (3, 16)):
        pages, free = free[: -(-num_keys // PAGE)], free[-(-num_keys // PAGE) :]
        position = torch.arange(num_keys)
        k, v = torch.randn(2, num_keys, n_kv_heads, 8, generator=generator)
        kv.write(1, k, v, pages[position // PAGE] * PAGE + position % PAGE)
        q = torch.randn(num_rows, 4, 8, generator=generator)
        queries.append(q)
        layout.append(SequenceLayout(num_rows, pages, num_keys))
        wanted.append(plain_attention(q, k, v))
    found = ATTENTION_BACKENDS[name]().plan(tuple(layout)).attend(torch.cat(queries), kv, 1)
    torch.testing.assert_close(found, torch.cat(wanted))
