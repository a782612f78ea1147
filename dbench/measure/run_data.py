"""A run as columns: what events.jsonl holds, sorted into frames that the tables are computed from.

The request frame has one row per measured request in the order of the intended sends: the raw columns
below, then one column per entry of REQUEST_METRICS. Moments are seconds of the file's clock (the client's).

    request_id, index, status, error, start_s (t = 0), intended_s, sent_s, done_s, first_block_s,
    num_prompt_tokens, gen_length, num_gen_tokens, num_forward_passes,
    task (None for a request that asks no problem), answer_is_right (missing where answers are not checked),
    and over its finished blocks (NaN without any): num_blocks, num_block_retries, first_block_queue_s,
    scheduling_delay_prefill_s, scheduling_delay_decode_s, prefill_s, decode_s, kv_transfer_s,
    kv_transfer_nonoverlapped_s, mean_gap_s, mean_tokens_per_pass
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dbench import __version__
from dbench.errors import UsageError
from dbench.event_file import read_events
from dbench.events import (
    EVENTS_FILE,
    SCHEMA_VERSION,
    BatchExecuted,
    BlockFinished,
    BlockRouted,
    LoadDrawn,
    RequestArrived,
    RequestDone,
    RequestFinished,
    RequestSent,
    RunEnded,
    RunStarted,
    ServerEnded,
    ServerStarted,
    WorkerState,
    WorkerUp,
)
from dbench.measure.blocks import DONE, StepTimes, block_frame, block_sums, step_times
from dbench.measure.event_log import EventLog, Window, collector_paused
from dbench.measure.intervals import Absence, absences, batch_frame, scheduler_intervals, worker_intervals
from dbench.metric_names import REQUEST_METRICS

MEASURED = "measured"
COMPLETED = "COMPLETED"
UNFINISHED = "UNFINISHED"
"""Status of a request that was sent and whose end the file does not hold."""


@dataclass(frozen=True, slots=True)
class RunData:
    """One run, loaded; nothing in it is changed after."""

    run_dir: Path
    log: EventLog
    """Every send and every end at the client, unmeasured requests included."""
    seen_from: str
    """client, or server for a folder that holds only the server's events."""
    window: Window
    num_requests: int
    """Measured requests that were drawn."""
    offered_qps: float | None
    """inf: all at once; 0: closed loop."""
    load: LoadDrawn | None
    ended: RunEnded | ServerEnded | None
    """The last line of whoever wrote the file; None where it is missing."""
    requests: pd.DataFrame
    blocks: pd.DataFrame
    """See `blocks.py`."""
    steps: StepTimes
    workers: tuple[int, ...]
    """Every worker that any event names."""
    absences: tuple[Absence, ...]
    worker_intervals: pd.DataFrame
    scheduler_intervals: pd.DataFrame
    batches: pd.DataFrame
    """See `intervals.py`."""


def load_run(run_dir: Path) -> RunData:
    """Read a run's folder; a torn last line and missing events of either side are no error.

    Raises UsageError when there is no events.jsonl or a line of it cannot be read.
    """
    path = run_dir / EVENTS_FILE
    if not path.is_file():
        raise UsageError(f"{run_dir}: no {EVENTS_FILE} here; give the folder of a run, such as reports/<time>-<name>")
    with collector_paused():
        return run_data(run_dir, _read_log(path))


def _read_log(path: Path) -> EventLog:
    """Raises UsageError."""
    try:
        with path.open(encoding="utf-8") as lines:
            log = EventLog(read_events(lines))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except TypeError:  # the only values that are compared while reading
        raise UsageError(
            f"{path}: an event whose at_s is no number; the file was changed after it was written"
        ) from None
    except ValueError as error:
        _check_schema(path, _written_schema(path))
        raise UsageError(f"{path}: {error}; the file was changed after it was written") from None
    for started in (log.last(RunStarted), log.last(ServerStarted)):
        if started:
            _check_schema(path, started.schema_version)
    return log


def _check_schema(path: Path, written: object) -> None:
    if written != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: events of schema {written!r}, and this dbench {__version__} reads "
            f"schema {SCHEMA_VERSION}; use the version that wrote them"
        )


def _written_schema(path: Path) -> object:
    """What the file says of itself, however odd the other lines are; this version where it says nothing."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if f'"{RunStarted.kind}"' in line or f'"{ServerStarted.kind}"' in line:
                with suppress(ValueError):
                    record = json.loads(line)
                    return record.get("schema_version") if isinstance(record, dict) else SCHEMA_VERSION
    return SCHEMA_VERSION


def run_data(run_dir: Path, log: EventLog) -> RunData:
    """Sort the events into frames."""
    is_of_a_client = any(map(log.of, (LoadDrawn, RequestSent)))
    is_of_a_server = not is_of_a_client and any(map(log.of, (ServerStarted, RequestArrived)))
    seen_from = "server" if is_of_a_server else "client"
    requests = _client_requests(log) if seen_from == "client" else _server_requests(log)
    requests = requests.sort_values(["intended_s", "index"], kind="stable").reset_index(drop=True)
    started = log.last(RunStarted)
    start_s = started.at_s if started else float(requests["intended_s"].min()) if len(requests) else log.last_s
    requests["start_s"] = start_s
    rows = {request_id: row for row, request_id in enumerate(requests["request_id"])}
    finished = [event for event in log.of(BlockFinished) if event.request_id in rows]
    blocks = block_frame(finished, rows)
    steps = step_times(finished, blocks)
    requests = requests.join(block_sums(blocks, steps, len(requests)))
    all_final = len(requests) > 0 and bool(requests["done_s"].notna().all())
    end_s = float(requests["done_s"].max()) if all_final else log.last_s
    window = Window(start_s, max(start_s, end_s))
    return RunData(
        run_dir=run_dir,
        log=EventLog([*log.of(RequestSent), *log.of(RequestDone)]),
        seen_from=seen_from,
        window=window,
        num_requests=started.num_requests if started else len(requests),
        offered_qps=started.offered_qps if started else None,
        load=log.last(LoadDrawn),
        ended=_server_ended(log) if is_of_a_server else log.last(RunEnded),
        requests=_with_metrics(requests),
        blocks=blocks,
        steps=steps,
        workers=_workers(log),
        absences=absences(log, window),
        worker_intervals=worker_intervals(log, window),
        scheduler_intervals=scheduler_intervals(log, window),
        batches=batch_frame(log, window),
    )


def _server_ended(log: EventLog) -> ServerEnded | None:
    """The end of the last server that wrote the file."""
    started, ended = log.last(ServerStarted), log.last(ServerEnded)
    return ended if ended and (started is None or started.at_s <= ended.at_s) else None


def _workers(log: EventLog) -> tuple[int, ...]:
    named = {e.worker_id for e in log.of(WorkerUp)} | {e.worker_id for e in log.of(BlockRouted)}
    named |= {e.worker_id for e in log.of(WorkerState)} | {e.worker_id for e in log.of(BatchExecuted)}
    return tuple(sorted(named))


def _client_requests(log: EventLog) -> pd.DataFrame:
    sent = [event for event in log.of(RequestSent) if event.role == MEASURED]
    done = {event.request_id: event for event in log.of(RequestDone)}
    ends = [done.get(event.request_id) for event in sent]
    return pd.DataFrame(
        {
            "request_id": pd.Series([e.request_id for e in sent], dtype=object),
            "index": np.array([e.index for e in sent], dtype=np.int64),
            "status": pd.Series([e.status if e else UNFINISHED for e in ends], dtype=object),
            "error": pd.Series([e.error if e else "" for e in ends], dtype=object),
            "intended_s": np.array([e.intended_s for e in sent], dtype=np.float64),
            "sent_s": np.array([e.at_s for e in sent], dtype=np.float64),
            "done_s": np.array([e.at_s if e else None for e in ends], dtype=np.float64),
            "first_block_s": np.array([e.first_block_s if e else None for e in ends], dtype=np.float64),
            "num_prompt_tokens": np.array([e.num_prompt_tokens for e in sent], dtype=np.int64),
            "gen_length": np.array([e.gen_length for e in sent], dtype=np.int64),
            "num_gen_tokens": np.array([e.num_gen_tokens if e else None for e in ends], dtype=np.float64),
            "num_forward_passes": np.array([e.num_forward_passes if e else None for e in ends], dtype=np.float64),
            "task": pd.Series([e.task or None for e in sent], dtype=object),
            "answer_is_right": pd.Series([e.answer_is_right if e else None for e in ends], dtype="boolean"),
        }
    )


def _server_requests(log: EventLog) -> pd.DataFrame:
    """A folder written by the server alone: arrival stands for both sends, the final status for the result."""
    arrived = log.of(RequestArrived)
    final = {event.request_id: event for event in log.of(RequestFinished)}
    ends = [final.get(event.request_id) for event in arrived]
    first_block = {e.request_id: e.at_s for e in log.of(BlockFinished) if e.block_index == 0 and e.outcome == DONE}
    return pd.DataFrame(
        {
            "request_id": pd.Series([e.request_id for e in arrived], dtype=object),
            "index": np.arange(len(arrived)),
            "status": pd.Series([e.status if e else UNFINISHED for e in ends], dtype=object),
            "error": pd.Series([e.error if e else "" for e in ends], dtype=object),
            "intended_s": np.array([e.at_s for e in arrived], dtype=np.float64),
            "sent_s": np.array([e.at_s for e in arrived], dtype=np.float64),
            "done_s": np.array([e.at_s if e else None for e in ends], dtype=np.float64),
            "first_block_s": np.array([first_block.get(e.request_id) for e in arrived], dtype=np.float64),
            "num_prompt_tokens": np.array([e.num_prompt_tokens for e in arrived], dtype=np.int64),
            "gen_length": np.array([e.gen_length for e in arrived], dtype=np.int64),
            "num_gen_tokens": np.array([e.num_gen_tokens if e else None for e in ends], dtype=np.float64),
            "num_forward_passes": np.array([e.num_forward_passes if e else None for e in ends], dtype=np.float64),
            "task": pd.Series([None] * len(arrived), dtype=object),
            "answer_is_right": pd.Series([None] * len(arrived), dtype="boolean"),
        }
    )


def _with_metrics(raw: pd.DataFrame) -> pd.DataFrame:
    """The raw columns and one column per request metric; NaN where a request has no such figure."""
    completed = raw["status"] == COMPLETED
    table = raw.copy()
    for name, metric in REQUEST_METRICS.items():
        values = metric.how(table).astype(np.float64)
        table[name] = values.where(completed) if metric.only_completed else values
    return table
