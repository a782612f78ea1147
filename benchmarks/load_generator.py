"""How late the load generator sends, against a target that answers at once.

    python benchmarks/load_generator.py [--seconds 5] [--json PATH]

Poisson arrivals; the lag is the actual less the intended send, as a run records it. The run is a whole one:
drawn schedule, events.jsonl on disk, live figures four times a second. What is printed beside the lag is the
processor time of this process while it sends, the log included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dbench.event_file import read_events
from dbench.events import RequestSent
from dbench.load.driver import run_load
from dbench.load.fake_target import NoopTarget
from dbench.options import LoadOptions, SamplingOptions
from dbench.progress import RunProgress
from dbench.quantiles import quantiles

TARGET_QPS = 2000.0
TARGET_P99_MS = 5.0
RATES = (10.0, 100.0, 500.0, 1000.0, TARGET_QPS, 4000.0)
SEED = 42


@dataclass(frozen=True, slots=True)
class Lag:
    """One run."""

    offered_qps: float
    num_requests: int
    sent_qps: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_share: float
    """Processor seconds per second of the run."""


class TimedTarget(NoopTarget):
    """Notes the processor time when measuring starts."""

    cpu_s = 0.0
    at_s = 0.0

    async def reset_metrics(self) -> None:
        self.cpu_s, self.at_s = time.process_time(), time.monotonic()


def measure(qps: float, seconds: float) -> Lag:
    num_requests = max(50, round(qps * seconds))
    load = LoadOptions(qps=qps, num_requests=num_requests, seed=SEED)
    target = TimedTarget()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        asyncio.run(run_load(target, load, SamplingOptions(), run_dir, on_progress=ignore))
        cpu_s, wall_s = time.process_time() - target.cpu_s, time.monotonic() - target.at_s
        with (run_dir / "events.jsonl").open() as lines:
            sent = [e for e in read_events(lines) if isinstance(e, RequestSent) and e.role == "measured"]
    lags_ms = [(event.at_s - event.intended_s) * 1e3 for event in sent]
    p50_ms, p99_ms, max_ms = quantiles(lags_ms, (0.5, 0.99, 1.0))
    span_s = max(event.at_s for event in sent) - sent[0].intended_s
    return Lag(qps, num_requests, (num_requests - 1) / span_s, p50_ms, p99_ms, max_ms, cpu_s / wall_s)


def ignore(progress: RunProgress) -> None:
    """The figures are made, as for a live view, and thrown away."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Lag of the load generator against a target that answers at once.")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    print(f"poisson arrivals, seed {SEED}, numpy {np.__version__}, Python {platform.python_version()}")
    print(f"{'offered/s':>10} {'sent/s':>10} {'requests':>9} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'cpu':>6}")
    lags = []
    for qps in RATES:
        lag = measure(qps, arguments.seconds)
        lags.append(lag)
        print(
            f"{lag.offered_qps:10.0f} {lag.sent_qps:10.1f} {lag.num_requests:9d} {lag.p50_ms:8.3f} {lag.p99_ms:8.3f} "
            f"{lag.max_ms:8.3f} {lag.cpu_share:6.0%}"
        )
    at_target = next(lag for lag in lags if lag.offered_qps == TARGET_QPS)
    print(f"target: p99 <= {TARGET_P99_MS:g} ms at {TARGET_QPS:.0f}/s; measured {at_target.p99_ms:.3f} ms")
    if arguments.json is not None:
        figures = {
            "target_qps": TARGET_QPS,
            "target_p99_ms": TARGET_P99_MS,
            "interval_type": "poisson",
            "seed": SEED,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "runs": [asdict(lag) for lag in lags],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
