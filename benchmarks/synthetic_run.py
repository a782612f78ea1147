"""Writes the events of a run that never happened: a small simulation of clients, a scheduler and workers.

For the speed of reports and for looking at figures. Nothing here says how fast a real server is.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dbench.events import (
    SCHEMA_VERSION,
    BatchExecuted,
    BlockFinished,
    BlockRouted,
    Event,
    LoadDrawn,
    RequestArrived,
    RequestDone,
    RequestFinished,
    RequestSent,
    RunEnded,
    RunStarted,
    SchedulerDepth,
    WorkerState,
    WorkerUp,
    event_to_json,
)

HOP_S = 0.0004
STEP_S = 0.006
TOKEN_S = 0.00002
MAX_ACTIVE = 32
TOKEN_BUDGET = 4096
BLOCK_LENGTH = 32
PAGE_SIZE = 16
NUM_PAGES = 8192


@dataclass(frozen=True, slots=True)
class Scenario:
    num_requests: int
    qps: float
    num_workers: int = 2
    num_blocks: int = 6
    tokens_per_step: int = 1
    error_share: float = 0.0
    seed: int = 42


@dataclass(slots=True)
class _Request:
    request_id: str
    index: int
    intended_s: float
    num_prompt_tokens: int
    num_blocks: int
    fails: bool
    first_block_s: float | None = None
    num_passes: int = 0


@dataclass(slots=True)
class _Block:
    request: _Request
    index: int
    ready_s: float
    received_s: float
    refresh_start_s: float = 0.0
    refresh_end_s: float = 0.0
    num_masked: int = BLOCK_LENGTH
    steps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def canvas(self) -> int:
        return self.request.num_prompt_tokens + self.request.num_blocks * BLOCK_LENGTH


@dataclass(slots=True)
class _Worker:
    worker_id: int
    waiting: deque[_Block] = field(default_factory=deque)
    active: list[_Block] = field(default_factory=list)
    refreshing: list[_Block] = field(default_factory=list)
    is_busy: bool = False
    started_s: float = 0.0
    num_rows: tuple[int, int] = (0, 0)


class Simulation:
    """Runs a scenario once; `events()` yields what everybody would have written, in no order across writers."""

    def __init__(self, scenario: Scenario, start_s: float = 5000.0) -> None:
        self.scenario = scenario
        self.start_s = start_s
        self.random = random.Random(scenario.seed)
        self.workers = [_Worker(i) for i in range(scenario.num_workers)]
        self.heap: list[tuple[float, int, object]] = []
        self.count = 0
        self.now_s = start_s

    def events(self) -> Iterator[Event]:
        yield self._drawn()
        yield RunStarted(self.start_s, "client", 1.8e9, SCHEMA_VERSION, self.scenario.num_requests, self.scenario.qps)
        for worker in self.workers:
            yield WorkerUp(self.start_s - 3, "scheduler", worker.worker_id, "cpu", NUM_PAGES, PAGE_SIZE, 1)
        yield from self._send_all()
        while self.heap:
            self.now_s, _, what = heapq.heappop(self.heap)
            if isinstance(what, _Block):
                yield from self._route(what)
            elif isinstance(what, _Worker):
                yield from self._land(what)
                yield from self._launch(what)
        yield RunEnded(self.now_s + 0.1, "client", "complete")

    def _send_all(self) -> Iterator[Event]:
        at_s = self.start_s
        for index in range(self.scenario.num_requests):
            prompt = max(64, min(4000, int(self.random.lognormvariate(7.5, 0.55))))
            num_blocks = self.random.randint(1, 2 * self.scenario.num_blocks - 1)
            fails = self.random.random() < self.scenario.error_share
            request = _Request(f"request-{index:05d}", index, at_s, prompt, num_blocks, fails)
            lag = 0.0002 + self.random.expovariate(3000)
            yield RequestSent(
                at_s + lag, "client", request.request_id, index, "measured", at_s, prompt, num_blocks * BLOCK_LENGTH
            )
            arrival_s = at_s + lag + HOP_S
            yield RequestArrived(arrival_s, "scheduler", request.request_id, prompt, num_blocks * BLOCK_LENGTH)
            self._later(arrival_s, _Block(request, 0, arrival_s, 0.0))
            at_s += self.random.expovariate(self.scenario.qps)

    def _route(self, block: _Block) -> Iterator[Event]:
        worker = min(self.workers, key=lambda w: len(w.waiting) + len(w.active) + len(w.refreshing))
        block.received_s = self.now_s + HOP_S
        yield SchedulerDepth(self.now_s, "scheduler", 1, block.canvas)
        yield BlockRouted(self.now_s, "scheduler", block.request.request_id, block.index, 0, worker.worker_id)
        yield SchedulerDepth(self.now_s + 0.0001, "scheduler", 0, 0)
        worker.waiting.append(block)
        yield self._state(worker, "busy" if worker.is_busy else "queued", block.received_s)
        if not worker.is_busy:
            worker.is_busy = True
            self.now_s = block.received_s
            yield from self._launch(worker)

    def _launch(self, worker: _Worker) -> Iterator[Event]:
        decode_rows = len(worker.active) * BLOCK_LENGTH
        prompt_rows = 0
        while worker.waiting and len(worker.active) + len(worker.refreshing) < MAX_ACTIVE:
            canvas = worker.waiting[0].canvas
            if prompt_rows and prompt_rows + canvas > TOKEN_BUDGET - decode_rows:
                break
            prompt_rows += canvas
            worker.refreshing.append(worker.waiting.popleft())
        worker.is_busy = bool(worker.active or worker.refreshing)
        yield self._state(worker, "busy" if worker.is_busy else "idle", self.now_s)
        if worker.is_busy:
            worker.started_s, worker.num_rows = self.now_s, (prompt_rows, decode_rows)
            self._later(self.now_s + STEP_S + TOKEN_S * (prompt_rows + decode_rows), worker)

    def _land(self, worker: _Worker) -> Iterator[Event]:
        for block in worker.refreshing:
            block.refresh_start_s, block.refresh_end_s = worker.started_s, self.now_s
        size = len(worker.refreshing) + len(worker.active)
        worker.active, worker.refreshing = worker.active + worker.refreshing, []
        unmasked = 0
        for block in worker.active:
            k = min(block.num_masked, self.random.randint(1, 2 * self.scenario.tokens_per_step - 1))
            block.num_masked -= k
            unmasked += k
            block.steps.append((self.now_s, k))
        prompt_rows, decode_rows = worker.num_rows
        yield BatchExecuted(
            self.now_s,
            f"worker-{worker.worker_id}",
            worker.worker_id,
            worker.started_s,
            size,
            prompt_rows,
            decode_rows,
            0,
            unmasked,
            None,
            0.0003,
        )
        ended = [block for block in worker.active if block.num_masked == 0]
        worker.active = [block for block in worker.active if block.num_masked]
        for block in ended:
            yield from self._finish(block, worker)

    def _finish(self, block: _Block, worker: _Worker) -> Iterator[Event]:
        request, at_s = block.request, self.now_s + HOP_S
        request.num_passes += len(block.steps)
        decode_start_s = block.refresh_end_s
        yield BlockFinished(
            at_s,
            "scheduler",
            request.request_id,
            block.index,
            0,
            worker.worker_id,
            "done",
            "",
            block.ready_s,
            block.ready_s,
            block.received_s,
            block.refresh_start_s,
            block.refresh_end_s,
            decode_start_s,
            self.now_s,
            tuple(end for end, _ in block.steps),
            tuple(k for _, k in block.steps),
        )
        request.first_block_s = request.first_block_s or at_s + HOP_S
        if block.index + 1 < request.num_blocks and not request.fails:
            self._later(at_s, _Block(request, block.index + 1, at_s, 0.0))
            return
        status, error = ("ERROR", "worker 1 was lost") if request.fails else ("COMPLETED", "")
        tokens = 0 if request.fails else request.num_blocks * BLOCK_LENGTH
        yield RequestFinished(at_s, "scheduler", request.request_id, status, tokens, request.num_passes, error)
        yield RequestDone(
            at_s + HOP_S,
            "client",
            request.request_id,
            status,
            tokens,
            request.num_passes,
            request.first_block_s,
            error,
            "",
        )

    def _state(self, worker: _Worker, name: str, at_s: float) -> WorkerState:
        active = worker.active + worker.refreshing
        canvases = sum(block.canvas for block in active)
        waiting = sum(block.canvas for block in worker.waiting)
        pages = sum(-(-block.canvas // PAGE_SIZE) for block in active)
        return WorkerState(
            at_s,
            f"worker-{worker.worker_id}",
            worker.worker_id,
            name,
            len(worker.waiting),
            len(active),
            canvases + waiting,
            canvases,
            pages,
            NUM_PAGES,
            0,
        )

    def _later(self, at_s: float, what: _Block | _Worker) -> None:
        self.count += 1
        heapq.heappush(self.heap, (at_s, self.count, what))

    def _drawn(self) -> LoadDrawn:
        scenario = self.scenario
        return LoadDrawn(
            self.start_s - 2,
            "client",
            scenario.seed,
            f"poisson, {scenario.qps:g} requests/s",
            "simulated",
            "arxiv",
            "conf_quota 1, temperature 0",
            True,
            BLOCK_LENGTH,
            4096,
            int(0.7 * scenario.num_requests),
            3,
            0,
            scenario.num_workers,
            (),
        )


def write_synthetic_run(run_dir: Path, scenario: Scenario) -> int:
    """events.jsonl of the scenario; returns the number of events."""
    run_dir.mkdir(parents=True, exist_ok=True)
    count = 0
    with (run_dir / "events.jsonl").open("w", encoding="utf-8") as file:
        for event in Simulation(scenario).events():
            file.write(event_to_json(event) + "\n")
            count += 1
    (run_dir / "config.yaml").write_text("model: embedded\nserved_model_name: embedded\n", encoding="utf-8")
    return count
