"""Step times of the embedded model on the CPU, beside the time of its matrix products alone.

    python benchmarks/cpu_step.py [--threads 2] [--json FILE]

Every sequence has a canvas of 170 tokens whose last 32 are one block, decoded one token per step (conf_quota 1), so
that every decode step computes 32 rows per sequence. Times are medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

from dbench.serve.families import ModelConfig, find_model, read_model_config
from dbench.serve.runner import Phase, Span, StepResult
from dbench.serve.sequence import BlockKey, BlockTask, SamplingParameters
from dbench.serve.torch_runner import RunnerConfig, TorchRunner, build_runner

CANVAS, BLOCK, PAGE = 170, 32, 16
BATCHES = (1, 8, 32)
SAMPLING = SamplingParameters("conf_quota", fixed_unmask_quota=1)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One batch size, in milliseconds."""

    num_sequences: int
    refresh_ms: float
    refresh_products_ms: float
    decode_ms: float
    decode_sampling_ms: float
    decode_products_ms: float


def attach_block(runner: TorchRunner, slot: int) -> None:
    generator = torch.Generator().manual_seed(slot)
    prompt = torch.randint(0, 256, (CANVAS - BLOCK,), generator=generator).tolist()
    task = BlockTask(
        key=BlockKey(f"sequence-{slot}", 0, 0),
        token_ids=tuple(prompt),
        num_masks=BLOCK,
        block_length=BLOCK,
        sampling=SAMPLING,
        request_seed=slot,
        ignore_eos=True,
        arrival_s=0.0,
        num_remaining_blocks=1,
    )
    pages = -(-CANVAS // PAGE)
    runner.attach(slot, task, tuple(range(slot * pages, (slot + 1) * pages)))


def decode_block(runner: TorchRunner, num_sequences: int) -> list[StepResult]:
    """The refresh and the 31 decode steps of one block of every sequence."""
    slots = range(num_sequences)
    for slot in slots:
        attach_block(runner, slot)
    results = [runner.collect(runner.launch(tuple(Span(slot, Phase.REFRESH, 0, CANVAS) for slot in slots)))]
    decode = tuple(Span(slot, Phase.DECODE, CANVAS - BLOCK, BLOCK) for slot in slots)
    while not all(span.done for span in results[-1].spans):
        results.append(runner.collect(runner.launch(decode)))
    for slot in slots:
        runner.detach(slot)
    return results


def median_ms(action: Callable[[], None], times: int = 7) -> float:
    action()
    seconds = []
    for _ in range(times):
        started_s = time.monotonic()
        action()
        seconds.append(time.monotonic() - started_s)
    return 1e3 * statistics.median(seconds)


def products_ms(config: ModelConfig, rows: int) -> float:
    """The matrix products of all layers over `rows` rows, and nothing else."""
    width, hidden = config.d_model, config.mlp_hidden_size
    shapes = [(3 * width, width), (width, width), (2 * hidden, width), (width, hidden)]
    operands = [(torch.randn(rows, inner), torch.randn(outer, inner)) for outer, inner in shapes]

    def multiply() -> None:
        for _ in range(config.n_layers):
            for x, weight in operands:
                linear(x, weight)

    return median_ms(multiply)


def measure(runner: TorchRunner, config: ModelConfig, num_sequences: int, blocks: int) -> StepTimes:
    decode_block(runner, num_sequences)
    results = [decode_block(runner, num_sequences) for _ in range(blocks)]
    decodes = [step for block in results for step in block[1:]]
    return StepTimes(
        num_sequences=num_sequences,
        refresh_ms=1e3 * statistics.median(block[0].completed_s - block[0].launched_s for block in results),
        refresh_products_ms=products_ms(config, num_sequences * CANVAS),
        decode_ms=1e3 * statistics.median(step.completed_s - step.launched_s for step in decodes),
        decode_sampling_ms=1e3 * statistics.median(step.sampling_s for step in decodes),
        decode_products_ms=products_ms(config, num_sequences * BLOCK),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4, help="blocks measured per batch size")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    directory = find_model("embedded")
    config = read_model_config(directory)
    assert config.mask_token_id is not None
    runner = build_runner(
        RunnerConfig(
            model_dir=directory,
            load_format="auto",
            dtype="float32",
            device="cpu",
            seed=0,
            num_pages=max(BATCHES) * -(-CANVAS // PAGE),
            page_size=PAGE,
            num_slots=max(BATCHES),
            block_length=BLOCK,
            mask_token_id=config.mask_token_id,
            num_threads=arguments.threads,
        )
    )
    rows = [measure(runner, config, batch, arguments.blocks) for batch in BATCHES]
    runner.close()
    print(f"embedded model, float32, {arguments.threads} threads, torch {torch.__version__}, {platform.machine()}")
    print(f"{'sequences':>9} {'refresh':>9} {'products':>9} {'decode':>9} {'sampling':>9} {'products':>9}   (ms)")
    for row in rows:
        print(
            f"{row.num_sequences:9d} {row.refresh_ms:9.2f} {row.refresh_products_ms:9.2f} {row.decode_ms:9.2f} "
            f"{row.decode_sampling_ms:9.2f} {row.decode_products_ms:9.2f}"
        )
    if arguments.json:
        figures = {
            "threads": arguments.threads,
            "torch": torch.__version__,
            "canvas": CANVAS,
            "block_length": BLOCK,
            "steps": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
