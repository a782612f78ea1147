"""How long a report takes, on a synthetic run.

    python benchmarks/report.py [--num-requests 10000] [--num-workers 2] [--qps 3] [--json PATH]

Six blocks of 32 steps per request on average. Wall and CPU seconds; on a busy machine believe the CPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from synthetic_run import Scenario, write_synthetic_run

from dbench.environment import cpu_model
from dbench.metrics import load_run
from dbench.report import write_report

TARGET_S = 20.0
TARGET_REQUESTS = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    what: str
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=TARGET_REQUESTS)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--qps", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    scenario = Scenario(arguments.num_requests, arguments.qps, arguments.num_workers)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        num_events = write_synthetic_run(run_dir, scenario)
        megabytes = (run_dir / "events.jsonl").stat().st_size / 1e6
        timings = [
            timed("load_run (part of the report)", lambda: load_run(run_dir)),
            timed("write_report", lambda: write_report(run_dir)),
            timed("write_report, with batches", lambda: write_report(run_dir, with_batches=True)),
        ]
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{scenario.num_requests} requests, {num_events} events, {megabytes:.0f} MB, {cpu_model()}")
    print(f"{'':32}{'wall s':>10}{'CPU s':>10}")
    for timing in timings:
        print(f"{timing.what:32}{timing.wall_s:10.2f}{timing.cpu_s:10.2f}")
    print(f"peak memory {memory_mb:.0f} MB; target: {TARGET_REQUESTS} requests within {TARGET_S:.0f} s on two cores")
    if arguments.json:
        record = {"scenario": asdict(scenario), "num_events": num_events, "memory_mb": memory_mb}
        arguments.json.write_text(json.dumps({**record, "timings": [asdict(t) for t in timings]}, indent=1) + "\n")


def timed(what: str, work: Callable[[], T]) -> Timing:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Timing(what, time.perf_counter() - wall_s, time.process_time() - cpu_s)


if __name__ == "__main__":
    main()
