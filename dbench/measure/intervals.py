"""What workers and scheduler were doing when, as frames whose rows tile the window or follow each other.

Times are seconds from the start of the window. Before its first recorded state a worker is idle and empty;
after its last one nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dbench.events import BatchExecuted, SchedulerDepth, WorkerLeft, WorkerLost, WorkerState, WorkerUp
from dbench.measure.event_log import EventLog, Window
from dbench.options import COLOCATED

_DEPTHS = (
    "queue_depth_waiting",
    "queue_depth_active",
    "outstanding_prefill_tokens",
    "decode_length_sum",
    "pages_used",
    "pages_total",
    "deficit_tokens",
)


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker whose stream ended before it was asked to."""

    worker_id: int
    reason: str
    start_time: float
    end_time: float | None
    """When it was up again; None if it was not by the end of the file."""


def absences(log: EventLog, window: Window) -> tuple[Absence, ...]:
    """The losses of workers in order of time, but for those that were over before the window began."""
    events = sorted((*log.of(WorkerUp), *log.of(WorkerLost)), key=lambda event: event.at_s)
    found: list[Absence] = []
    for number, event in enumerate(events):
        if not isinstance(event, WorkerLost):
            continue
        back = (e.at_s for e in events[number:] if isinstance(e, WorkerUp) and e.worker_id == event.worker_id)
        back_s = next(back, None)
        if back_s is None or back_s > window.start_s:
            end = None if back_s is None else back_s - window.start_s
            found.append(Absence(event.worker_id, event.reason, event.at_s - window.start_s, end))
    return tuple(found)


def worker_intervals(log: EventLog, window: Window) -> pd.DataFrame:
    """One row per recorded state, in the window, tiling it for each worker: worker_id, worker_type, times, state,
    the depths, token sums and pages of WorkerState, and kv_page_utilization_ratio. A worker whose stream ended is
    `lost`, or `ended` after a drain, until it is up again.
    """
    states = log.of(WorkerState)
    recorded = pd.DataFrame(
        {
            "worker_id": _ints([e.worker_id for e in states]),
            "at_s": np.array([e.at_s for e in states], dtype=np.float64),
            "state": [e.state for e in states],
            "queue_depth_waiting": _ints([e.queue_depth_waiting for e in states]),
            "queue_depth_active": _ints([e.queue_depth_active for e in states]),
            "outstanding_prefill_tokens": _ints([e.outstanding_prefill_tokens for e in states]),
            "decode_length_sum": _ints([e.decode_length_sum for e in states]),
            "pages_used": _ints([e.pages_used for e in states]),
            "pages_total": _ints([e.pages_total for e in states]),
            "deficit_tokens": _ints([e.deficit_tokens for e in states]),
        }
    )
    pages = {e.worker_id: e.pages_total for e in states}
    pages |= {e.worker_id: e.pages_total for e in log.of(WorkerUp)}
    changes = [(e.worker_id, e.at_s, "idle") for e in log.of(WorkerUp)]
    changes += [(e.worker_id, e.at_s, "lost") for e in log.of(WorkerLost)]
    changes += [(e.worker_id, e.at_s, "ended") for e in log.of(WorkerLeft)]
    changes += [(worker_id, -np.inf, "idle") for worker_id in {*pages, *(c[0] for c in changes)}]
    empty = pd.DataFrame(changes, columns=["worker_id", "at_s", "state"])
    empty = empty.assign(**dict.fromkeys(_DEPTHS, 0))
    empty["pages_total"] = [pages.get(worker_id, 0) for worker_id in empty["worker_id"]]
    both = pd.concat([empty, recorded]) if states else empty
    types = {e.worker_id: e.worker_type for e in log.of(WorkerUp)}
    both["worker_type"] = pd.Series([types.get(i, COLOCATED) for i in both["worker_id"]], both.index, dtype=object)
    both["kv_page_utilization_ratio"] = both["pages_used"] / both["pages_total"].clip(lower=1)
    both = both.sort_values(["worker_id", "at_s"], kind="stable").reset_index(drop=True)
    return _tile(both, ["worker_id"], window)


def scheduler_intervals(log: EventLog, window: Window) -> pd.DataFrame:
    """start_time, end_time, scheduler_pending_requests, pending_prefill_tokens, scheduler_decode_ready_requests,
    tiling the window.
    """
    depths = log.of(SchedulerDepth)
    recorded = pd.DataFrame(
        {
            "at_s": np.array([-np.inf, *(e.at_s for e in depths)]),
            "scheduler_pending_requests": [0, *(e.pending_requests for e in depths)],
            "pending_prefill_tokens": [0, *(e.pending_prefill_tokens for e in depths)],
            "scheduler_decode_ready_requests": [0, *(e.decode_ready_requests for e in depths)],
        }
    )
    return _tile(recorded.sort_values("at_s", kind="stable").reset_index(drop=True), [], window)


def batch_frame(log: EventLog, window: Window) -> pd.DataFrame:
    """A row per batch that ran in the window, by worker and time; columns of BATCH_METRICS and their times."""
    batches = log.of(BatchExecuted)
    start = np.array([e.start_s for e in batches], dtype=np.float64) - window.start_s
    end = np.array([e.at_s for e in batches], dtype=np.float64) - window.start_s
    prompt_len = _ints([e.batch_prompt_len for e in batches])
    gen_len = _ints([e.batch_gen_len for e in batches])
    duration = end - start
    throughput = np.divide(prompt_len + gen_len, duration, out=np.full(len(batches), np.nan), where=duration > 0)
    table = pd.DataFrame(
        {
            "worker_id": _ints([e.worker_id for e in batches]),
            "start_time": start,
            "end_time": end,
            "batch_phase": _phases(prompt_len, gen_len),
            "batch_size": _ints([e.batch_size for e in batches]),
            "batch_num_tokens": prompt_len + gen_len,
            "batch_prompt_len": prompt_len,
            "batch_gen_len": gen_len,
            "batch_num_void_tokens": _ints([e.batch_num_void_tokens for e in batches]),
            "batch_num_unmasked_tokens": _ints([e.batch_num_unmasked_tokens for e in batches]),
            "batch_decode_length_std": np.array([e.batch_decode_length_std for e in batches], dtype=np.float64),
            "batch_execution_time": duration,
            "batch_sampling_time": np.array([e.batch_sampling_time for e in batches], dtype=np.float64),
            "batch_token_throughput": throughput,
        }
    )
    table["batch_op_attn_time"] = np.array([e.batch_op_attn_time for e in batches], dtype=np.float64)
    table["batch_op_mlp_time"] = np.array([e.batch_op_mlp_time for e in batches], dtype=np.float64)
    table["batch_op_qkv_time"] = np.array([e.batch_op_qkv_time for e in batches], dtype=np.float64)
    table = table.sort_values(["worker_id", "end_time"], kind="stable").reset_index(drop=True)
    table["inter_batch_delay"] = table["start_time"] - table.groupby("worker_id")["end_time"].shift()
    in_window = (table["end_time"] > 0) & (table["start_time"] < window.length_s)
    return table[in_window].reset_index(drop=True)


def _ints(values: list[int]) -> NDArray[np.int64]:
    """A column whose type pandas need not find out: half a million values in a quarter of the time."""
    return np.array(values, dtype=np.int64)


def _phases(prompt_len: NDArray[np.int64], gen_len: NDArray[np.int64]) -> pd.Series:
    phases = np.where(gen_len == 0, "prefill", np.where(prompt_len == 0, "decode", "mixed"))
    return pd.Series(phases, dtype=object)


def _tile(recorded: pd.DataFrame, keys: list[str], window: Window) -> pd.DataFrame:
    """Sorted records with `at_s` become intervals that end where the next of the same key begins, cut to the window."""
    start = recorded["at_s"] - window.start_s
    following = start.groupby([recorded[k] for k in keys]).shift(-1) if keys else start.shift(-1)
    end = following.fillna(window.length_s).clip(upper=window.length_s)
    table = recorded.drop(columns="at_s")
    table.insert(len(keys), "start_time", start.clip(lower=0))
    table.insert(len(keys) + 1, "end_time", end)
    return table[table["end_time"] > table["start_time"]].reset_index(drop=True)
