"""Small runs written by hand: every time is in seconds after START_S, the first intended send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dbench.events import (
    SCHEMA_VERSION,
    BatchExecuted,
    BlockFinished,
    Event,
    LoadDrawn,
    RequestArrived,
    RequestDone,
    RequestFinished,
    RequestSent,
    RunEnded,
    RunStarted,
    SchedulerDepth,
    ServerEnded,
    ServerStarted,
    WorkerLeft,
    WorkerLost,
    WorkerState,
    WorkerUp,
    event_to_json,
)
from dbench.measure.event_log import EventLog
from dbench.measure.run_data import RunData, run_data

START_S = 1000.0
"""Of the file's clock; not 0, so that a forgotten subtraction shows."""


def run_of(*events: Event) -> RunData:
    return run_data(Path("run"), EventLog(events))


def write_run(folder: Path, events: Iterable[Event], tail: str = "") -> Path:
    """A run's folder with its events.jsonl; `tail` is what a killed writer left of a last line."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(event_to_json(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines + tail, encoding="utf-8")
    return folder


def started(num_requests: int = 1, offered_qps: float = 2.0) -> RunStarted:
    return RunStarted(START_S, "client", 1.8e9, SCHEMA_VERSION, num_requests, offered_qps)


def ended(at: float = 10.0, reason: str = "complete", detail: str = "") -> RunEnded:
    return RunEnded(START_S + at, "client", reason, detail)


def drawn(
    *, num_rounded: int = 0, num_shortened: int = 0, num_repeated: int = 0, notes: tuple[str, ...] = ()
) -> LoadDrawn:
    return LoadDrawn(
        START_S - 1,
        "client",
        seed=42,
        arrivals="poisson, 2 requests/s",
        lengths="trace arxiv",
        trace="arxiv",
        sampling="conf_threshold 0.9, temperature 0",
        ignore_eos=True,
        block_length=32,
        max_total_tokens=4096,
        num_rounded=num_rounded,
        num_shortened=num_shortened,
        num_repeated=num_repeated,
        num_warmup=1,
        notes=notes,
    )


def sent(
    request_id: str = "a",
    index: int = 0,
    *,
    intended: float = 0.0,
    lag: float = 0.0,
    role: str = "measured",
    gen_length: int = 4,
) -> RequestSent:
    return RequestSent(START_S + intended + lag, "client", request_id, index, role, START_S + intended, 10, gen_length)


def done(
    request_id: str = "a",
    at: float = 1.0,
    *,
    status: str = "COMPLETED",
    num_gen_tokens: int = 4,
    num_forward_passes: int = 2,
    first_block: float | None = None,
) -> RequestDone:
    error = "" if status == "COMPLETED" else f"request {request_id} was lost"
    first_block_s = None if first_block is None else START_S + first_block
    return RequestDone(
        START_S + at, "client", request_id, status, num_gen_tokens, num_forward_passes, first_block_s, error, ""
    )


def server_started(at: float = -9.0) -> ServerStarted:
    return ServerStarted(START_S + at, "scheduler", 1.8e9, SCHEMA_VERSION)


def server_ended(at: float = 20.0, reason: str = "ended", detail: str = "") -> ServerEnded:
    return ServerEnded(START_S + at, "scheduler", reason, detail)


def arrived(request_id: str = "a", at: float = 0.0) -> RequestArrived:
    return RequestArrived(START_S + at, "scheduler", request_id, 10, 4)


def finished(request_id: str = "a", at: float = 1.0, status: str = "COMPLETED") -> RequestFinished:
    return RequestFinished(START_S + at, "scheduler", request_id, status, 4, 2, "")


def block(
    request_id: str = "a",
    block_index: int = 0,
    *,
    scheduler: tuple[float, float, float],
    worker: tuple[float, float, float, float, float],
    steps: tuple[tuple[float, int], ...],
    attempt: int = 0,
    worker_id: int = 0,
) -> BlockFinished:
    """scheduler = ready, routed, finished; worker = received, refresh start and end, decode start, end;
    steps = (end, tokens fixed) of each pass.
    """
    received, refresh_start, refresh_end, decode_start, end = (START_S + t for t in worker)
    return replace(
        failed_block(request_id, block_index, scheduler=scheduler, attempt=attempt),
        worker_id=worker_id,
        outcome="done",
        error="",
        received_s=received,
        refresh_start_s=refresh_start,
        refresh_end_s=refresh_end,
        decode_start_s=decode_start,
        end_s=end,
        step_end_s=tuple(START_S + end for end, _ in steps),
        step_num_unmasked=tuple(count for _, count in steps),
    )


def failed_block(
    request_id: str = "a", block_index: int = 0, *, scheduler: tuple[float, float, float], attempt: int = 0
) -> BlockFinished:
    """An attempt whose worker was lost before its refresh ran."""
    ready, routed, finished_at = (START_S + t for t in scheduler)
    return BlockFinished(
        at_s=finished_at,
        source="scheduler",
        request_id=request_id,
        block_index=block_index,
        attempt=attempt,
        worker_id=0,
        outcome="failed",
        error="worker 0 was lost",
        ready_s=ready,
        routed_s=routed,
        received_s=None,
        refresh_start_s=None,
        refresh_end_s=None,
        decode_start_s=None,
        end_s=None,
        step_end_s=(),
        step_num_unmasked=(),
    )


def state(
    at: float, name: str, waiting: int = 0, active: int = 0, *, worker_id: int = 0, pages_used: int = 0
) -> WorkerState:
    return WorkerState(START_S + at, f"worker-{worker_id}", worker_id, name, waiting, active, 0, 0, pages_used, 10, 0)


def batch(
    start: float, end: float, *, prompt_len: int = 0, gen_len: int = 0, size: int = 1, worker_id: int = 0
) -> BatchExecuted:
    return BatchExecuted(
        START_S + end, f"worker-{worker_id}", worker_id, START_S + start, size, prompt_len, gen_len, 0, 3, None, 0.001
    )


def pending(at: float, requests: int) -> SchedulerDepth:
    return SchedulerDepth(START_S + at, "scheduler", requests, 0)


def worker_up(at: float = -5.0, worker_id: int = 0) -> WorkerUp:
    return WorkerUp(START_S + at, "scheduler", worker_id, "cpu", 10, 16, 1)


def worker_lost(at: float, worker_id: int = 0) -> WorkerLost:
    return WorkerLost(START_S + at, "scheduler", worker_id, "its stream ended")


def worker_left(at: float, worker_id: int = 0) -> WorkerLeft:
    return WorkerLeft(START_S + at, "scheduler", worker_id)


def simple_requests(latencies: Iterable[float | None], gap: float = 1.0) -> list[Event]:
    """A run of measured requests `gap` seconds apart; None = a request that failed after 0.5 s."""
    values = list(latencies)
    events: list[Event] = [started(len(values))]
    for index, latency in enumerate(values):
        intended = index * gap
        events.append(sent(f"r{index}", index, intended=intended))
        status = "COMPLETED" if latency is not None else "ERROR"
        events.append(done(f"r{index}", intended + (0.5 if latency is None else latency), status=status))
    return [*events, ended(len(values) * gap + 100)]
