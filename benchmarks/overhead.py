"""What an engine step costs the host, with a fake runner that computes nothing.

    python benchmarks/overhead.py [--json PATH]

Every finished block is followed by a new one, so that the batch stays full: 2,752-token canvases, blocks
of 32, one token per step. The fake runner's own share is measured inside the same steps and printed beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dbench.serve.engine import Engine
from dbench.serve.engine_state import EngineLimits
from dbench.serve.fake_runner import FakeRunner, FakeScript, SystemClock
from dbench.serve.pages import PagePool
from dbench.serve.runner import Span, StepResult, Ticket
from dbench.serve.sequence import BlockKey, BlockTask, SamplingParameters

TARGET_MS = 0.4
TARGET_SEQUENCES = 32
BLOCK_LENGTH = 32
CANVAS_LENGTH = 2752
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds per step, the fake runner and the taking of events included."""

    driver: str
    rule: str
    num_sequences: int
    num_steps: int
    mean_batch_size: float
    """The token budget keeps it below num_sequences where refreshes have to wait."""
    mean_ms: float
    p50_ms: float
    p99_ms: float
    runner_mean_ms: float
    """The fake runner's share of mean_ms."""


class TimedRunner(FakeRunner):
    """Adds up the seconds spent inside launch and collect."""

    seconds = 0.0
    num_spans = 0

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        self.num_spans += len(spans)
        start = time.perf_counter()
        try:
            return super().launch(spans)
        finally:
            self.seconds += time.perf_counter() - start

    def collect(self, ticket: Ticket) -> StepResult:
        start = time.perf_counter()
        try:
            return super().collect(ticket)
        finally:
            self.seconds += time.perf_counter() - start


def block_task(number: int, sampling: SamplingParameters) -> BlockTask:
    return BlockTask(
        key=BlockKey(f"request-{number}", 0, 0),
        token_ids=(7,) * (CANVAS_LENGTH - BLOCK_LENGTH),
        num_masks=BLOCK_LENGTH,
        block_length=BLOCK_LENGTH,
        sampling=sampling,
        request_seed=number,
        ignore_eos=True,
        arrival_s=float(number),
        num_remaining_blocks=1,
    )


def measure(num_sequences: int, *, overlap: bool, sampling: SamplingParameters, num_steps: int) -> Overhead:
    """Time `num_steps` steps after the batch has filled and its blocks are out of step with each other."""
    pages = PagePool(num_sequences * -(-CANVAS_LENGTH // PAGE_SIZE), PAGE_SIZE)
    runner = TimedRunner(FakeScript(), page_size=PAGE_SIZE, clock=SystemClock())
    limits = EngineLimits(
        max_batch_size=num_sequences,
        max_tokens_per_iteration=4096,
        block_length=BLOCK_LENGTH,
        max_model_len=4096,
        queue_policy="arrival_order",
        overlap=overlap,
        eos_token_ids=(),
    )
    engine = Engine(runner, pages, limits, worker_id=0)
    for number in range(num_sequences):
        engine.submit(block_task(number, sampling))
    submitted = num_sequences
    seconds: list[float] = []
    num_warmup = 4 * num_sequences + BLOCK_LENGTH
    gc.collect()
    gc.freeze()
    for step in range(num_warmup + num_steps):
        if step == num_warmup:
            runner.seconds = 0.0
            runner.num_spans = 0
        start = time.perf_counter()
        report = engine.step()
        engine.take_events()
        seconds.append(time.perf_counter() - start)
        assert report is not None
        for _ in report.ended:
            engine.submit(block_task(submitted, sampling))
            submitted += 1
    gc.unfreeze()
    measured = sorted(1e3 * s for s in seconds[num_warmup:])
    return Overhead(
        driver="overlap" if overlap else "plain",
        rule=sampling.unmasking_strategy,
        num_sequences=num_sequences,
        num_steps=num_steps,
        mean_batch_size=runner.num_spans / num_steps,
        mean_ms=sum(measured) / num_steps,
        p50_ms=measured[num_steps // 2],
        p99_ms=measured[num_steps * 99 // 100],
        runner_mean_ms=1e3 * runner.seconds / num_steps,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per row (default 2000)")
    arguments = parser.parse_args()
    sampling = SamplingParameters("conf_quota", fixed_unmask_quota=1)
    rows = [
        measure(num_sequences, overlap=overlap, sampling=sampling, num_steps=arguments.steps)
        for num_sequences in (1, 8, TARGET_SEQUENCES, 128)
        for overlap in (False, True)
    ]
    print(f"host milliseconds per engine step; target {TARGET_MS} at {TARGET_SEQUENCES} sequences")
    print(f"{'sequences':>9} {'batch':>6} {'driver':>8} {'mean':>7} {'p50':>7} {'p99':>7} {'of it fake runner':>18}")
    for row in rows:
        print(
            f"{row.num_sequences:9d} {row.mean_batch_size:6.1f} {row.driver:>8} "
            f"{row.mean_ms:7.3f} {row.p50_ms:7.3f} {row.p99_ms:7.3f} {row.runner_mean_ms:18.3f}"
        )
    if arguments.json is not None:
        record = {
            "schema_version": 1,
            "target_ms": TARGET_MS,
            "target_sequences": TARGET_SEQUENCES,
            "canvas_length": CANVAS_LENGTH,
            "block_length": BLOCK_LENGTH,
            "python": sys.version.split()[0],
            "machine": platform.machine(),
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
