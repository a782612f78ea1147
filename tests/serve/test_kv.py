"""The paged pool: what is written at a slot is read back in canvas order, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from dbench.serve.families import read_model_config
from dbench.serve.kv import KvPool
from tests.serve.checkpoints import write_checkpoint

PAGE = 4


def pool_of(directory: Path) -> KvPool:
    config = read_model_config(write_checkpoint(directory, {}, 1))
    return KvPool(config, num_pages=6, page_size=PAGE, like=torch.zeros(1))


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(seed))


def test_rows_come_back_in_canvas_order_from_shuffled_pages(tmp_path: Path) -> None:
    kv, pages = pool_of(tmp_path), torch.tensor([5, 0, 3])
    position = torch.arange(10)
    k, v = rows(10, 1), rows(10, 2)
    kv.write(1, k, v, pages[position // PAGE] * PAGE + position % PAGE)
    found_k, found_v = kv.gather(1, pages, 10)
    assert torch.equal(found_k, k)
    assert torch.equal(found_v, v)


def test_pool_takes_memory_where_it_is_written_and_not_before(tmp_path: Path) -> None:
    config = read_model_config(write_checkpoint(tmp_path, {}, 1))
    process = psutil.Process()
    before = process.memory_info().rss
    kv = KvPool(config, num_pages=100_000, page_size=PAGE, like=torch.zeros(1))
    kv.write(0, rows(PAGE, 1), rows(PAGE, 2), torch.arange(PAGE))
    num_bytes = 100_000 * PAGE * config.kv_bytes_per_token(4)
    assert process.memory_info().rss - before < num_bytes / 10


def test_layers_and_other_pages_stay_apart(tmp_path: Path) -> None:
    kv = pool_of(tmp_path)
    kv.write(0, rows(PAGE, 1), rows(PAGE, 2), torch.arange(PAGE))
    assert not kv.gather(1, torch.arange(6), 24).any()
    assert not kv.gather(0, torch.arange(1, 6), 20).any()


def test_rows_with_slot_minus_one_are_not_written(tmp_path: Path) -> None:
    kv = pool_of(tmp_path)
    k, v = rows(3, 1), rows(3, 2)
    kv.write(2, k, v, torch.tensor([-1, 7, -1]))
    found = kv.gather(2, torch.arange(6), 24)
    assert torch.equal(found[0, 7], k[1])
    assert torch.equal(found[1, 7], v[1])
    assert int(found.any(dim=-1).any(dim=-1).sum()) == 2
