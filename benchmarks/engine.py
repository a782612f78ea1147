"""The engine on one CUDA device, without a server: step times, the fixed list at once, and a table of costs.

Everything stands beside its floor, measured in the same process (benchmarks/floors.py).
    python benchmarks/engine.py [--model llada-8b] [--json FILE] [--list FILE.csv] [--costs FILE.csv]
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from floors import Floors, Work, measure_floors

from dbench.environment import describe_environment
from dbench.serve.cuda_build import CudaSettings, build_cuda_runner
from dbench.serve.cuda_runner import CudaRunner
from dbench.serve.engine import Engine
from dbench.serve.engine_state import EngineLimits
from dbench.serve.families import FAMILIES, find_model, read_model_config
from dbench.serve.pages import PagePool
from dbench.serve.runner import LayerWatcher, Phase, Span, StepResult, Ticket
from dbench.serve.sequence import BlockKey, BlockOutcome, BlockTask, SamplingParameters
from dbench.serve.torch_runner import RunnerConfig

PAGE_SIZE = 16
BLOCK_LENGTH = 32
MAX_MODEL_LEN = 4096
MAX_TOKENS = 4096
MAX_BATCH_SIZE = 128
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
KEYS = 2752
STEP_BATCHES = (1, 8, 20, 32, 64)
COSTED_REFRESHES = ((0, 0), (512, 512), (1024, 1024), (2048, 2048), (4096, 1024), (4096, 4096))
"""(packed tokens, length of each refresh)"""
REFRESHES: tuple[tuple[int, ...], ...] = ((256,), (512,), (1024,), (2752,), (4096,), (1024, 1024, 1024, 1024))


@dataclass(slots=True)
class Batch:
    """One batch as the runner saw it."""

    work: Work
    launched_s: float
    completed_s: float
    device_s: float
    host_s: float
    """In launch: what the host needed to queue it."""


@dataclass(slots=True)
class WatchedRunner:
    """Passes everything on and remembers what each batch was and took."""

    runner: CudaRunner
    tasks: dict[int, BlockTask] = field(default_factory=dict)
    masks_left: dict[int, int] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    launched: dict[Ticket, tuple[tuple[Span, ...], float]] = field(default_factory=dict)

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        self.tasks[slot], self.masks_left[slot] = task, task.block_length - len(fixed or ())
        self.runner.attach(slot, task, pages, fixed)

    def watch_layers(self, watcher: LayerWatcher) -> None:
        self.runner.watch_layers(watcher)

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        started_s = time.monotonic()
        ticket = self.runner.launch(spans)
        self.launched[ticket] = (spans, time.monotonic() - started_s)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        spans, host_s = self.launched.pop(ticket)
        result = self.runner.collect(ticket)
        decodes = [span for span in spans if span.phase is Phase.DECODE]
        masked = sum(self.masks_left[got.slot] for got in result.spans if not got.void)
        for got in result.spans:
            self.masks_left[got.slot] -= len(got.positions)
        work = Work(
            refresh_lengths=tuple(span.num_rows for span in spans if span.phase is Phase.REFRESH),
            decode_rows=sum(span.num_rows for span in decodes),
            decode_keys=tuple(self.tasks[span.slot].canvas_length for span in decodes),
            masked_rows=masked,
        )
        self.batches.append(Batch(work, result.launched_s, result.completed_s, result.device_s or 0.0, host_s))
        return result

    def detach(self, slot: int) -> None:
        self.runner.detach(slot)

    def close(self) -> None:
        self.runner.close()


@dataclass(frozen=True, slots=True)
class Wanted:
    prompt_len: int
    gen_len: int

    @property
    def num_blocks(self) -> int:
        return -(-self.gen_len // BLOCK_LENGTH)


class Bench:
    """One model on the device, with an engine made anew for every measurement."""

    def __init__(self, model: str, seed: int) -> None:
        directory = find_model(model)
        self.config = read_model_config(directory)
        self.shift = FAMILIES[self.config.family].logit_shift
        assert self.config.mask_token_id is not None
        started_s = time.monotonic()
        self.max_model_len = min(MAX_MODEL_LEN, self.config.max_sequence_length)
        self.runner = build_cuda_runner(
            RunnerConfig(
                model_dir=directory, load_format="random", dtype="bfloat16", device="cuda:0", seed=seed,
                num_pages=None, page_size=PAGE_SIZE, num_slots=MAX_BATCH_SIZE, block_length=BLOCK_LENGTH,
                mask_token_id=self.config.mask_token_id, num_threads=4,
            ),
            CudaSettings(
                max_model_len=self.max_model_len, max_tokens_per_iteration=MAX_TOKENS, cache_mode="exact",
                attention_backend="auto", gpu_memory_utilization=0.9, graph_batch_sizes=GRAPH_SIZES,
                measured_layer=None,
            ),
        )  # fmt: skip
        self.startup_s = time.monotonic() - started_s
        self.watched = WatchedRunner(self.runner)

    def engine(self) -> Engine:
        self.watched.batches.clear()
        limits = EngineLimits(
            max_batch_size=MAX_BATCH_SIZE, max_tokens_per_iteration=MAX_TOKENS, block_length=BLOCK_LENGTH,
            max_model_len=self.max_model_len, queue_policy="arrival_order", overlap=True,
            eos_token_ids=self.config.eos_token_ids, logit_shift=self.shift,
        )  # fmt: skip
        return Engine(self.watched, PagePool(self.runner.num_pages, PAGE_SIZE), limits, worker_id=0)

    def task(self, number: int, wanted: Wanted, block: int, sampling: SamplingParameters) -> BlockTask:
        length = wanted.prompt_len + block * BLOCK_LENGTH
        ids = tuple((number * 7919 + i * 104729) % 100000 for i in range(length))
        return BlockTask(
            BlockKey(str(number), block, 0), ids, (wanted.num_blocks - block) * BLOCK_LENGTH, BLOCK_LENGTH, sampling,
            number, True, float(number), wanted.num_blocks - block,
        )  # fmt: skip


def quota(count: int) -> SamplingParameters:
    return SamplingParameters("conf_quota", fixed_unmask_quota=count)


def run_to_end(bench: Bench, wanted: list[Wanted], sampling: SamplingParameters) -> float:
    """All requests at once, block after block; seconds from the first submission to the last block's end."""
    engine = bench.engine()
    waiting = deque((number, 0) for number in range(len(wanted)))
    started_s = time.monotonic()
    while True:
        while waiting:
            number, block = waiting.popleft()
            engine.submit(bench.task(number, wanted[number], block, sampling))
        report = engine.step()
        if report is None:
            return time.monotonic() - started_s
        for end in report.ended:
            assert end.outcome is BlockOutcome.DONE, end.error
            number, block = int(end.key.request_id), end.key.block_index + 1
            if block < wanted[number].num_blocks:
                waiting.append((number, block))


def decode_steps(bench: Bench, floors: Floors, num_sequences: int) -> dict[str, Any]:
    """Batches in which every sequence decodes a block over KEYS keys, one token per step."""
    runner, shift = bench.watched, bench.shift
    pages_each = -(-KEYS // PAGE_SIZE)
    for slot in range(num_sequences):
        task = bench.task(slot, Wanted(KEYS - BLOCK_LENGTH, BLOCK_LENGTH), 0, quota(1))
        runner.attach(slot, task, tuple(range(slot * pages_each, (slot + 1) * pages_each)))
        runner.collect(runner.launch((Span(slot, Phase.REFRESH, 0, KEYS),)))
    start = KEYS - BLOCK_LENGTH
    spans = tuple(Span(slot, Phase.DECODE, start - shift, BLOCK_LENGTH + shift, start) for slot in range(num_sequences))
    runner.batches.clear()
    ticket = runner.launch(spans)
    for _ in range(BLOCK_LENGTH - 2):
        next_ticket = runner.launch(spans)
        runner.collect(ticket)
        ticket = next_ticket
    runner.collect(ticket)
    for slot in range(num_sequences):
        runner.detach(slot)
    steps = list(runner.batches)[2:]
    ratios = [b.device_s / floors.floor(b.work) for b in steps]
    gaps = [b.completed_s - a.completed_s for a, b in pairwise(steps)]
    return {
        "sequences": num_sequences,
        "steps": len(steps),
        "device_ms": statistics.median(b.device_s for b in steps) * 1e3,
        "interval_ms": statistics.median(gaps) * 1e3 if gaps else float("nan"),
        "floor_ms": statistics.median(floors.floor(b.work) for b in steps) * 1e3,
        "reachable_ms": statistics.median(floors.reachable(b.work) for b in steps) * 1e3,
        "over_floor": statistics.median(ratios),
        "fastest_ms": min(b.device_s for b in steps) * 1e3,
        "slowest_ms": max(b.device_s for b in steps) * 1e3,
        "host_ms": statistics.median(b.host_s for b in steps) * 1e3,
    }


def refresh(bench: Bench, floors: Floors, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One batch of refreshes alone, several times."""
    taken, host = [], []
    for _ in range(5):
        run_to_end(bench, [Wanted(n - BLOCK_LENGTH, BLOCK_LENGTH) for n in lengths], quota(BLOCK_LENGTH))
        batches = [b for b in bench.watched.batches if b.work.refresh_lengths == lengths]
        taken += [b.device_s for b in batches[:1]]
        host += [b.host_s for b in batches[:1]]
        work = batches[0].work if batches else Work(refresh_lengths=lengths, masked_rows=BLOCK_LENGTH * len(lengths))
    if not taken:
        return {"lengths": list(lengths), "note": "the token budget never put them into one batch"}
    device_s = statistics.median(taken[1:] or taken)
    return {
        "lengths": list(lengths),
        "device_ms": device_s * 1e3,
        "floor_ms": floors.floor(work) * 1e3,
        "reachable_ms": floors.reachable(work) * 1e3,
        "over_floor": device_s / floors.floor(work),
        "host_ms": statistics.median(host) * 1e3,
    }


def fixed_list(bench: Bench, floors: Floors, wanted: list[Wanted], per_step: int) -> dict[str, Any]:
    """The requests at once; the floor is the sum of the floors of the batches that were run."""
    seconds = run_to_end(bench, wanted, quota(per_step))
    batches = bench.watched.batches
    busy = sum(b.device_s for b in batches)
    return {
        "requests": len(wanted),
        "tokens_per_step": per_step,
        "seconds": seconds,
        "requests_per_s": len(wanted) / seconds,
        "floor_of_its_batches_s": sum(floors.floor(b.work) for b in batches),
        "reachable_of_its_batches_s": sum(floors.reachable(b.work) for b in batches),
        "batches": len(batches),
        "idle_share": 1 - busy / (batches[-1].completed_s - batches[0].launched_s),
    }


def costs(bench: Bench, path: Path) -> None:
    """Batch time against packed refresh tokens, decode sequences and keys of each, as a CSV for simulators."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["refresh_tokens", "refresh_length", "decode_sequences", "keys", "device_s"])
        file.flush()
        for row in measured_costs(bench):
            writer.writerow(row)
            file.flush()


def measured_costs(bench: Bench) -> Iterator[tuple[int, int, int, int, float]]:
    runner = bench.runner
    for keys in (512, 2048, 4064):
        for sequences in (0, 1, 2, 4, 8, 16, 32, 64, 128):
            for tokens, length in COSTED_REFRESHES:
                refreshes = tokens // length if length else 0
                pages = sequences * -(-keys // PAGE_SIZE) + refreshes * -(-length // PAGE_SIZE)
                if not tokens + sequences or sequences + refreshes > MAX_BATCH_SIZE or pages > runner.num_pages:
                    continue
                if sequences == 0 and keys != 512:
                    continue  # keys say nothing without decode spans
                seconds = one_cost(bench, keys, sequences, refreshes, length)
                yield tokens, length, sequences, keys, round(seconds, 6)


def one_cost(bench: Bench, keys: int, sequences: int, refreshes: int, length: int) -> float:
    """The faster of two launches of the same spans; what they compute means nothing."""
    runner, shift, first_page = bench.runner, bench.shift, 0
    spans: list[Span] = []
    for slot in range(sequences + refreshes):
        canvas = keys if slot < sequences else length
        task = bench.task(slot, Wanted(canvas - BLOCK_LENGTH, BLOCK_LENGTH), 0, quota(1))
        num_pages = -(-canvas // PAGE_SIZE)
        runner.attach(slot, task, tuple(range(first_page, first_page + num_pages)))
        first_page += num_pages
        start = task.block_start
        if slot < sequences:
            spans.append(Span(slot, Phase.DECODE, start - shift, BLOCK_LENGTH + shift, start))
        else:
            spans.append(Span(slot, Phase.REFRESH, 0, canvas))
    taken = [runner.collect(runner.launch(tuple(spans))).device_s or 0.0 for _ in range(2)]
    for slot in range(sequences + refreshes):
        runner.detach(slot)
    return min(taken)


def read_list(path: Path) -> list[Wanted]:
    with path.open(encoding="utf-8") as file:
        return [Wanted(int(row["prompt_len"]), int(row["gen_len"])) for row in csv.DictReader(file)]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for row in rows:
        cells = (
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print("  " + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llada-8b")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", type=Path, default=Path(__file__).parent / "requests_arxiv.csv")
    parser.add_argument("--costs", type=Path, help="write the cost table here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["steps", "refreshes", "list"])
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0005)
    bench = Bench(arguments.model, arguments.seed)
    floors = measure_floors(bench.config, bench.runner.weights)
    gc.collect()
    gc.freeze()
    result: dict[str, Any] = {
        "model": arguments.model,
        "weights": "normal(0, 0.02), norms 1, bfloat16",
        "seed": arguments.seed,
        "environment": describe_environment(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "kv_tokens": bench.runner.num_pages * PAGE_SIZE,
        "startup_s": bench.startup_s,
        "copy_bytes_per_s": floors.bandwidth,
        "products_ms": {rows: seconds * 1e3 for rows, seconds in floors.layer_seconds.items()},
        "lm_head_ms": {rows: seconds * 1e3 for rows, seconds in floors.head_seconds.items()},
    }
    show("device", [{k: result[k] for k in ("model", "device", "torch", "kv_tokens", "startup_s", "copy_bytes_per_s")}])
    show("products of all layers and LM head, ms by rows", [result["products_ms"], result["lm_head_ms"]])
    if "steps" in arguments.only:
        result["decode_steps"] = [decode_steps(bench, floors, count) for count in STEP_BATCHES]
        show(f"decode steps over {KEYS} keys", result["decode_steps"])
    if "refreshes" in arguments.only:
        fitting = [lengths for lengths in REFRESHES if max(lengths) <= bench.max_model_len]
        result["refreshes"] = [refresh(bench, floors, lengths) for lengths in fitting]
        show("refreshes alone", result["refreshes"])
    if "list" in arguments.only:
        wanted = read_list(arguments.list)
        runs = ((wanted[:1], 1), (wanted[:32], 1), (wanted[:32], 4))
        result["fixed_list"] = [fixed_list(bench, floors, some, per_step) for some, per_step in runs]
        show("the fixed list at once", result["fixed_list"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if arguments.costs:
        costs(bench, arguments.costs)
    result_memory = torch.cuda.max_memory_reserved() / 2**30
    print(f"\nreserved at most {result_memory:.1f} GiB")


if __name__ == "__main__":
    main()
