"""Decode attention as a captured step runs it: dbench's kernel by tiling, FlashInfer's, and the floor.

A floor is the larger of bytes of K and V over the copy bandwidth measured here and arithmetic over 510 TFLOP/s.
    python benchmarks/attention.py [--json FILE] [--keys 2750]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from floors import copy_bandwidth, seconds_of
from torch import Tensor

from dbench.serve.kernels.attention import SpanAttention, SpanKeys, Tiling

PAGE_SIZE = 16
NUM_LAYERS = 4
ARITHMETIC_FLOPS = 510e12
SEQUENCES = (1, 4, 8, 16, 32, 64)
DREAM_CUTS = ((64, 128, 4), (128, 64, 4), (128, 128, 8), (256, 64, 8))


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    rows: int
    head_dim: int = 128


SHAPES = (Shape("llada-8b", 32, 32, 32), Shape("dream-7b", 28, 4, 33))


@dataclass(frozen=True, slots=True)
class Workload:
    shape: Shape
    num_spans: int
    num_keys: int
    q: Tensor
    kv: Tensor
    """[layers, 2, places, K, D]"""
    pages: Tensor
    lengths: Tensor
    slots: Tensor

    @property
    def kv_bytes(self) -> int:
        return 2 * self.num_spans * self.num_keys * self.shape.kv_heads * self.shape.head_dim * 2

    @property
    def flops(self) -> int:
        return 4 * self.num_spans * self.shape.rows * self.shape.heads * self.num_keys * self.shape.head_dim


def workload(shape: Shape, num_spans: int, num_keys: int) -> Workload:
    pages_each = -(-num_keys // PAGE_SIZE)
    num_pages = num_spans * pages_each + 1
    device = "cuda"
    kv = torch.empty(
        NUM_LAYERS, 2, num_pages * PAGE_SIZE, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device
    )
    kv.normal_()
    order = torch.randperm(num_pages - 1, device=device)
    q = torch.randn(num_spans * shape.rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    return Workload(
        shape,
        num_spans,
        num_keys,
        q,
        kv,
        order.view(num_spans, pages_each),
        torch.full((num_spans,), num_keys, dtype=torch.int64, device=device),
        torch.arange(num_spans, dtype=torch.int32, device=device),
    )


def seconds_in_graph(layer: Callable[[int], None]) -> float:
    """Time of one layer, from a captured graph that runs all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(NUM_LAYERS):
            layer(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(NUM_LAYERS):
            layer(number)
    return seconds_of(graph.replay) / NUM_LAYERS


def own_kernel(work: Workload, tiling: Tiling, out: Tensor) -> Callable[[int], None]:
    shape = work.shape
    attention = SpanAttention(shape.heads, shape.kv_heads, shape.head_dim)
    attention.reserve(work.num_spans, shape.rows, tiling, out.device)
    keys = SpanKeys(work.slots, work.pages, work.lengths, PAGE_SIZE)
    return lambda layer: attention.run(work.q, work.kv[layer], keys, tiling, out)


def flashinfer_kernel(work: Workload, backend: str, out: Tensor) -> Callable[[int], None]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    shape, spans = work.shape, work.num_spans
    pages_each = work.pages.shape[1]
    place = torch.arange(spans + 1, dtype=torch.int32)
    indices = work.pages.flatten().int()
    wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=torch.empty(spans + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indptr_buf=torch.empty(spans + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buf=torch.empty(len(indices), dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buf=torch.empty(spans, dtype=torch.int32, device="cuda"),
        backend=backend,
    )
    last_page = torch.full((spans,), work.num_keys - (pages_each - 1) * PAGE_SIZE, dtype=torch.int32)
    wrapper.plan(
        place * shape.rows, place * pages_each, indices, last_page, shape.heads, shape.kv_heads, shape.head_dim,
        PAGE_SIZE, causal=False, q_data_type=torch.bfloat16,
    )  # fmt: skip
    paged = work.kv.unflatten(2, (-1, PAGE_SIZE))
    heads_out = out.view(-1, shape.heads, shape.head_dim)
    return lambda layer: wrapper.run(work.q, (paged[layer, 0], paged[layer, 1]), out=heads_out)


def tilings(shape: Shape, num_spans: int) -> list[Tiling]:
    if shape.heads == shape.kv_heads:
        cuts = [(32, n, 4, stages) for n in (64, 128) for stages in (2, 3, 4)]
        chunks = [c for c in (1, 2, 4, 8, 12, 16) if c * num_spans <= 16]
    else:
        cuts = [(m, n, warps, 3) for m, n, warps in DREAM_CUTS]
        chunks = [c for c in (1, 2, 4, 8, 16) if c * num_spans <= 32]
    return [Tiling(count, *cut, first) for cut in cuts for count in chunks or [1] for first in (False, True)]


def measure(work: Workload, bandwidth: float) -> dict[str, Any]:
    shape = work.shape
    out = torch.empty(len(work.q), shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    floor = max(work.kv_bytes / bandwidth, work.flops / ARITHMETIC_FLOPS)
    result: dict[str, Any] = {
        "model": shape.name, "sequences": work.num_spans, "keys": work.num_keys, "floor_us": floor * 1e6,
    }  # fmt: skip
    reference: Tensor | None = None
    for backend in ("fa2", "fa3"):
        layer = flashinfer_kernel(work, backend, out)
        result[f"flashinfer_{backend}_us"] = seconds_in_graph(layer) * 1e6
        layer(0)
        reference = out.float()
    assert reference is not None
    own = []
    for tiling in tilings(shape, work.num_spans):
        try:
            layer = own_kernel(work, tiling, out)
            layer(0)
            worst = (out.float() - reference).abs().max().item()
            own.append({**asdict(tiling), "us": seconds_in_graph(layer) * 1e6, "worst_difference": worst})
        except Exception as error:  # a tiling may not fit into shared memory
            own.append({**asdict(tiling), "error": str(error).splitlines()[0][:100]})
    own.sort(key=lambda entry: entry.get("us", float("inf")))
    return {**result, "dbench": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keys", type=int, default=2750)
    parser.add_argument("--sequences", type=int, nargs="*", default=SEQUENCES)
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    print("model     seqs  floor  fa2   fa3   dbench us (chunks, m, n, warps, stages, values first)")
    results = []
    for shape in SHAPES:
        for num_spans in arguments.sequences:
            work = workload(shape, num_spans, arguments.keys)
            found = measure(work, bandwidth)
            results.append(found)
            best = found["dbench"][:3]
            tiles = "  ".join(
                f"{t['us']:.0f} ({t['num_chunks']},{t['block_m']},{t['block_n']},{t['num_warps']},"
                f"{t['num_stages']},{'v' if t['values_first'] else '-'}; diff {t['worst_difference']:.3f})"
                for t in best
                if "us" in t
            )
            print(
                f"{shape.name:9} {num_spans:4} {found['floor_us']:6.0f} {found['flashinfer_fa2_us']:5.0f} "
                f"{found['flashinfer_fa3_us']:5.0f}   {tiles}",
                flush=True,
            )
            del work
            torch.cuda.empty_cache()
            if arguments.json:
                arguments.json.write_text(json.dumps({"bandwidth": bandwidth, "results": results}, indent=1))


if __name__ == "__main__":
    main()
