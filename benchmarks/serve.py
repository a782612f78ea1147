"""The whole system on the fixed list of requests: alone, all at once, and open loop, beside the floor of the work.

A server process with workers on CUDA devices, and this process as its client over gRPC; random weights, conf_quota,
ignore_eos. Latency counts from the intended send time. The floor is the time that the arithmetic of the requests
needs at the best rates measured here before the server starts (benchmarks/floors.py).
    python benchmarks/serve.py [--model llada-8b] [--gpus 0] [--scenarios alone at-once open-loop] [--json FILE]
    python benchmarks/serve.py --scenarios soak --soak-qps 1.4 --soak-seconds 240
    python benchmarks/serve.py --gpus 0,1 --set mode=hybrid prefill_gpus=0 hybrid_colocated_gpus=1 --scenarios at-once
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from floors import Floors, Work, measure_floors

from dbench.config import resolve
from dbench.engine_options import HYBRID
from dbench.environment import describe_environment
from dbench.events import BatchExecuted, BlockFinished
from dbench.load.target import GrpcTarget, LoadRequest, Outcome, SamplingParameters
from dbench.options import COMMAND_SECTIONS, EngineOptions, ServiceOptions
from dbench.resolve import resolve_serve
from dbench.serve.families import FAMILIES, ModelConfig, find_model, read_model_config
from dbench.serve.launch import ServerProcess
from dbench.serve.weights import WeightSource, load_weights

HERE = Path(__file__).parent
BLOCK_LENGTH = 32
FLOOR_LAYERS = 8
BEST_ROWS = 8192
SAMPLE_S = 5.0
KV_ELEMENT_SIZE = 2


@dataclass(frozen=True, slots=True)
class Timed:
    """One request as the client saw it."""

    due_s: float
    ended_s: float
    outcome: Outcome

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.due_s


def floors_of(config: ModelConfig, directory: Path) -> Floors:
    """From a few layers of the model, which are freed again."""
    few = replace(config, n_layers=FLOOR_LAYERS)
    source = WeightSource(directory, "random", torch.bfloat16, torch.device("cuda", 0), 0)
    found = measure_floors(few, load_weights(few, source))
    torch.cuda.empty_cache()
    scale = config.n_layers / FLOOR_LAYERS
    return replace(found, config=config, layer_seconds={n: s * scale for n, s in found.layer_seconds.items()})


def floor_of(requests: Sequence[LoadRequest], per_step: int, floors: Floors, shift: int) -> float:
    """Seconds that one device needs for all of them in perfectly filled batches."""
    seconds = 0.0
    row_s = floors.products(BEST_ROWS) / BEST_ROWS
    head_row_s = floors.head_seconds[4096] / 4096
    steps = -(-BLOCK_LENGTH // per_step) - 1
    masked = sum(BLOCK_LENGTH - per_step * step for step in range(steps + 1))
    for request in requests:
        canvas = len(request.prompt_token_ids) + request.gen_length
        decode_rows = steps * (BLOCK_LENGTH + shift)
        attention = floors.attention(
            Work((canvas,), decode_rows, (canvas,) * steps),
        )
        num_blocks = request.gen_length // BLOCK_LENGTH
        seconds += num_blocks * ((canvas + decode_rows) * row_s + masked * head_row_s + attention)
    return seconds


def read_requests(path: Path, vocabulary: int, per_step: int, seed: int) -> list[LoadRequest]:
    """The fixed list in file order; lengths rounded up to blocks, random ids, a seed each."""
    generator = np.random.default_rng(seed)
    with path.open(encoding="utf-8") as file:
        rows = [(int(row["prompt_len"]), int(row["gen_len"])) for row in csv.DictReader(file)]
    return [
        LoadRequest(
            index,
            tuple(generator.integers(0, min(vocabulary, 100_000), prompt).tolist()),
            -(-gen // BLOCK_LENGTH) * BLOCK_LENGTH,
            SamplingParameters("conf_quota", fixed_unmask_quota=per_step),
            seed + index,
            True,
        )
        for index, (prompt, gen) in enumerate(rows)
    ]


async def send_all(target: GrpcTarget, requests: Sequence[LoadRequest], due: Sequence[float]) -> list[Timed]:
    """Send each request at its time; seconds count from the first."""
    started_s = time.monotonic()

    async def send(request: LoadRequest, due_s: float) -> Timed:
        await asyncio.sleep(max(0.0, started_s + due_s - time.monotonic()))
        outcome = await target.generate(request, lambda _: None)
        return Timed(due_s, time.monotonic() - started_s, outcome)

    return list(await asyncio.gather(*(send(r, d) for r, d in zip(requests, due, strict=True))))


def summary(name: str, timed: Sequence[Timed], events: Sequence[BatchExecuted], floor_s: float) -> dict[str, Any]:
    latencies = np.array([t.latency_s for t in timed])
    seconds = max(t.ended_s for t in timed)
    tokens = sum(len(t.outcome.token_ids) for t in timed)
    failed = [t.outcome.error for t in timed if not t.outcome.completed]
    return {
        "scenario": name,
        "requests": len(timed),
        "failed": len(failed),
        "first_error": failed[0] if failed else "",
        "seconds": seconds,
        "requests_per_s": (len(timed) - len(failed)) / seconds,
        "floor_s": floor_s,
        "floor_requests_per_s": len(timed) / floor_s,
        "tokens_per_forward_pass": tokens / max(1, sum(t.outcome.num_forward_passes for t in timed)),
        **{f"latency_p{q}_s": float(np.quantile(latencies, q / 100)) for q in (50, 90, 99)},
        "idle_share": idle_share(events),
    }


def idle_share(events: Sequence[BatchExecuted]) -> float:
    """Share of each worker's time from its first batch to its last: after a batch's end, before the next launch."""
    idle = total = 0.0
    for worker in {event.worker_id for event in events}:
        own = sorted((e for e in events if e.worker_id == worker), key=lambda e: e.at_s)
        idle += sum(max(0.0, b.start_s - a.at_s) for a, b in zip(own, own[1:], strict=False))  # noqa: RUF007
        total += own[-1].at_s - own[0].start_s
    return idle / total if total else 0.0


def transfers(blocks: Sequence[BlockFinished], canvases: Mapping[str, int], token_bytes: int) -> dict[str, Any]:
    """What moving KV between workers took, and how much of it a refresh hid; empty where nothing moved."""
    taken = hidden = num_bytes = 0.0
    for block in blocks:
        start_s, end_s, refreshed_s = block.kv_transfer_start_s, block.kv_transfer_end_s, block.refresh_end_s
        if start_s is None or end_s is None or refreshed_s is None:
            continue
        took = max(0.0, end_s - start_s)
        taken, num_bytes = taken + took, num_bytes + canvases[block.request_id] * token_bytes
        hidden += took - max(0.0, end_s - max(start_s, refreshed_s))
    if not taken:
        return {}
    return {"transfer_s": taken, "transfer_hidden_share": hidden / taken, "transfer_bytes_per_s": num_bytes / taken}


class Memory:
    """Samples of what server and workers hold: host bytes, and bytes in use on the devices."""

    def __init__(self, server_pid: int, gpus: str) -> None:
        self._gpus = gpus
        self._server = psutil.Process(server_pid)
        self.samples: list[tuple[float, int, int]] = []

    async def watch(self) -> None:
        started_s = time.monotonic()
        while True:
            self.samples.append((time.monotonic() - started_s, self._host(), device_bytes(self._gpus)))
            await asyncio.sleep(SAMPLE_S)

    def _host(self) -> int:
        total = 0
        for process in (self._server, *self._server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def growth_after(self, first_s: float) -> dict[str, float]:
        """Ratio of the last sample to the first one after `first_s`, less 1."""
        later = [sample for sample in self.samples if sample[0] >= first_s]
        first, last = later[0], later[-1]
        return {"host_growth": last[1] / first[1] - 1, "device_growth": last[2] / first[2] - 1, "host_bytes": last[1]}


def device_bytes(gpus: str) -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpus]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return sum(int(line) for line in lines) << 20


def arrivals(qps: float, count: int) -> list[float]:
    """Times of Poisson arrivals: the committed gaps over the rate. Those of the first 40 to 600 have a mean near 1."""
    gaps = [float(line) for line in (HERE / "gaps_poisson.csv").read_text(encoding="utf-8").split()[1:]]
    times: list[float] = (np.cumsum([0.0, *gaps[: count - 1]]) / qps).tolist()
    return times


class Bench:
    """One server and what is sent to it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        directory = find_model(arguments.model)
        self.config = read_model_config(directory)
        self.shift = FAMILIES[self.config.family].logit_shift
        self.floors = floors_of(self.config, directory)
        flags = {"model": arguments.model, "load_format": "random", "scheduler_port": 0}
        flags |= dict(option.split("=", 1) for option in arguments.set)
        if flags.get("mode") != HYBRID:
            flags["gpus"] = arguments.gpus
        resolved = resolve_serve(resolve(COMMAND_SECTIONS["serve"], flags, yaml_path=None, environment={}))
        engine, service = resolved.section(EngineOptions), resolved.section(ServiceOptions)
        log = Path(tempfile.mkdtemp()) / "server.log"
        self.server = ServerProcess(engine, service, log_path=log, config_json=resolved.to_json())
        self.log = log

    def requests(self, per_step: int) -> list[LoadRequest]:
        return read_requests(self.arguments.list, self.config.vocab_size, per_step, self.arguments.seed)

    async def run(self, name: str, per_step: int, count: int, qps: float | None, pid: int) -> dict[str, Any]:
        some = self.requests(per_step)
        some = [replace(some[i % len(some)], index=i, request_seed=i) for i in range(count)]
        due = [0.0] * count if qps is None else arrivals(qps, count)
        async with aclosing(GrpcTarget(self.server.address)) as target:
            await target.info()
            warm = [replace(some[0], index=-1, gen_length=BLOCK_LENGTH)] * (2 * len(self.arguments.gpus.split(",")))
            await send_all(target, warm, [0.0] * len(warm))
            await target.reset_metrics()
            memory = Memory(pid, self.arguments.gpus)
            watch = asyncio.create_task(memory.watch())
            timed = await send_all(target, some, due)
            watch.cancel()
            events = [event async for event in target.export_events()]
        num_devices = len(self.arguments.gpus.split(","))
        batches = [event for event in events if isinstance(event, BatchExecuted)]
        found = summary(name, timed, batches, floor_of(some, per_step, self.floors, self.shift) / num_devices)
        offered = (count - 1) / due[-1] if due[-1] > 0 else None  # the gaps drawn, not the rate they were drawn for
        found |= {"tokens_per_step": per_step, "nominal_qps": qps, "offered_qps": offered}
        canvases = {
            t.outcome.request_id: len(request.prompt_token_ids) + request.gen_length
            for t, request in zip(timed, some, strict=True)
        }
        blocks = [event for event in events if isinstance(event, BlockFinished)]
        found |= transfers(blocks, canvases, self.config.kv_bytes_per_token(KV_ELEMENT_SIZE))
        if name == "soak":
            found |= memory.growth_after(60.0)
        return found


SCENARIOS = ("alone", "at-once", "open-loop", "soak")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llada-8b")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=["alone", "at-once", "open-loop"])
    parser.add_argument("--requests", type=int, default=32, help="of the list, at once")
    parser.add_argument("--per-step", type=int, nargs="*", default=[1, 4], help="tokens per step, at once")
    parser.add_argument("--qps", type=float, default=0.65)
    parser.add_argument("--open-loop-requests", type=int, default=48)
    parser.add_argument("--soak-qps", type=float, default=1.4)
    parser.add_argument("--soak-seconds", type=float, default=240)
    parser.add_argument("--list", type=Path, default=HERE / "requests_arxiv.csv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="serve options by YAML name")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    plans: dict[str, list[tuple[int, int, float | None]]] = {
        "alone": [(1, 1, None)],
        "at-once": [(per_step, arguments.requests, None) for per_step in arguments.per_step],
        "open-loop": [(1, arguments.open_loop_requests, arguments.qps)],
        "soak": [(1, int(arguments.soak_qps * arguments.soak_seconds), arguments.soak_qps)],
    }
    result: dict[str, Any] = {
        "model": arguments.model,
        "gpus": arguments.gpus,
        "weights": "normal(0, 0.02), norms 1, bfloat16",
        "rule": "conf_quota, ignore_eos",
        "list": arguments.list.name,
        "seed": arguments.seed,
        "set": arguments.set,
        "environment": describe_environment(),
        "torch": torch.__version__,
        "scenarios": [],
    }
    started_s = time.monotonic()
    try:
        with bench.server as server:
            result["startup_s"] = time.monotonic() - started_s
            print(f"server ready after {result['startup_s']:.0f} s")
            for name in arguments.scenarios:
                for per_step, count, qps in plans[name]:
                    found = asyncio.run(bench.run(name, per_step, count, qps, server.pid))
                    result["scenarios"].append(found)
                    cells = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
                    print("  ".join(cells), flush=True)
                    if arguments.json:
                        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    finally:
        if bench.log.is_file():
            print(bench.log.read_text(encoding="utf-8")[-3000:])


if __name__ == "__main__":
    main()
