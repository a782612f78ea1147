"""Everything that happened, as records: one JSON line each in events.jsonl.

Every number in a report is derived from these. Times are seconds of the writer's monotonic clock;
`source` names the writer ("client", "scheduler", "worker-0"). The server's writers are brought to
the scheduler's clock before they leave it, and to the client's when a run stores them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, ClassVar

from dbench.json_values import finite_or_text

EVENTS_FILE = "events.jsonl"
"""Its name in the folder of a run or of a server."""

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Event:
    """The root: when, and who says so."""

    kind: ClassVar[str]
    at_s: float
    source: str


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """t = 0 of a run: `at_s` is the first intended send of a measured request."""

    kind: ClassVar[str] = "run_started"
    unix_s: float
    schema_version: int
    num_requests: int
    offered_qps: float
    """inf for all at once; 0 for a closed loop."""


@dataclass(frozen=True, slots=True)
class LoadDrawn(Event):
    """What was drawn, before the first request goes out; the counts are over the measured requests."""

    kind: ClassVar[str] = "load_drawn"
    seed: int
    arrivals: str
    """For a reader, such as "poisson, 2 requests/s"."""
    lengths: str
    """For a reader, such as "trace arxiv, prompt x0.05, gen x0.05"."""
    trace: str
    """Name or file; empty for fixed lengths."""
    sampling: str
    """For a reader, such as "conf_threshold 0.9, temperature 0"."""
    ignore_eos: bool
    block_length: int
    max_total_tokens: int
    num_rounded: int
    """gen_length was raised to a multiple of block_length."""
    num_shortened: int
    """The prompt was cut to fit max_total_tokens."""
    num_repeated: int
    """Drawn from a row of a trace file that an earlier request had used."""
    num_warmup: int
    notes: tuple[str, ...]
    """Lines that the report must show."""
    checks_answers: bool = False


@dataclass(frozen=True, slots=True)
class RequestSent(Event):
    """The client has handed a request to its transport; `at_s` is the actual send."""

    kind: ClassVar[str] = "request_sent"
    request_id: str
    index: int
    """Place in the drawn schedule, from 0; warm-up and tail requests have their own numbers."""
    role: str
    """warmup, measured or tail; only measured requests enter a summary."""
    intended_s: float
    num_prompt_tokens: int
    gen_length: int
    task: str = ""
    """The kind of problem that it asks, if it asks one."""


@dataclass(frozen=True, slots=True)
class RequestDone(Event):
    """The client holds the complete result; `at_s` is when."""

    kind: ClassVar[str] = "request_done"
    request_id: str
    status: str
    """COMPLETED, ERROR, CANCELLED, or TIMEOUT: never final within benchmark_timeout."""
    num_gen_tokens: int
    num_forward_passes: int
    first_block_s: float | None
    """When the first block arrived."""
    error: str
    token_ids_sha256: str
    """Of the generated ids as decimal text joined by commas; empty unless COMPLETED."""
    answer_is_right: bool | None = None
    """False also for a request that did not complete; None where answers are not checked."""
    answer_text: str = ""
    """What was answered, where that is wrong."""


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The last line of a run that ended by itself."""

    kind: ClassVar[str] = "run_ended"
    reason: str
    """complete, timeout, interrupted, server_lost, or stopped (by a stop rule)."""
    detail: str = ""
    """One line: the rule that stopped it, or the error that ended it."""


@dataclass(frozen=True, slots=True)
class ServerStarted(Event):
    """The first line of a server in its own folder."""

    kind: ClassVar[str] = "server_started"
    unix_s: float
    schema_version: int


@dataclass(frozen=True, slots=True)
class ServerEnded(Event):
    """The last line of a server that was not killed, in its own folder."""

    kind: ClassVar[str] = "server_ended"
    reason: str
    """ended (it was asked to), or failed."""
    detail: str = ""
    """One line: the error that ended it."""


@dataclass(frozen=True, slots=True)
class RequestArrived(Event):
    """The scheduler has accepted a request."""

    kind: ClassVar[str] = "request_arrived"
    request_id: str
    num_prompt_tokens: int
    gen_length: int


@dataclass(frozen=True, slots=True)
class BlockRouted(Event):
    """A block was sent to a worker."""

    kind: ClassVar[str] = "block_routed"
    request_id: str
    block_index: int
    attempt: int
    worker_id: int
    """Who refreshes it."""
    decode_worker_id: int | None = None
    """Hybrid mode: who is to decode it, if somebody else was chosen."""


@dataclass(frozen=True, slots=True)
class BlockFinished(Event):
    """The scheduler has received the end of a block.

    The times of the worker are already on the scheduler's clock; differences between two worker times
    are exact, between a worker time and a scheduler time only as good as the clock offset.
    """

    kind: ClassVar[str] = "block_finished"
    request_id: str
    block_index: int
    attempt: int
    worker_id: int
    outcome: str
    """done, failed or cancelled."""
    error: str
    ready_s: float
    """Scheduler: the block could first have been routed (arrival, end of the previous block, or a failed attempt)."""
    routed_s: float
    """Scheduler: the block was sent to the worker."""
    received_s: float | None
    """Worker: the block entered the worker's queue. The worker times are None if the refresh never ran."""
    refresh_start_s: float | None
    refresh_end_s: float | None
    decode_start_s: float | None
    end_s: float | None
    step_end_s: tuple[float, ...]
    """One per forward pass, the refresh first."""
    step_num_unmasked: tuple[int, ...]
    """Returned tokens that each pass fixed."""
    prefill_worker_id: int | None = None
    """Hybrid mode, of a block that was refreshed elsewhere: who did. The worker times up to `refresh_end_s` are its."""
    kv_transfer_start_s: float | None = None
    """Prefill worker: it began to send the first layer."""
    kv_transfer_end_s: float | None = None
    """Worker: the last layer had arrived."""


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """The scheduler has given a request its final status."""

    kind: ClassVar[str] = "request_finished"
    request_id: str
    status: str
    num_gen_tokens: int
    num_forward_passes: int
    error: str


@dataclass(frozen=True, slots=True)
class SchedulerDepth(Event):
    """Recorded at every change: requests with a block that no worker has yet."""

    kind: ClassVar[str] = "scheduler_depth"
    pending_requests: int
    pending_prefill_tokens: int
    decode_ready_requests: int = 0
    """Hybrid mode: requests with a refreshed block for which no worker has room."""


@dataclass(frozen=True, slots=True)
class WorkerState(Event):
    """Recorded at every change on a worker."""

    kind: ClassVar[str] = "worker_state"
    worker_id: int
    state: str
    """idle, queued (work waits and nothing runs) or busy."""
    queue_depth_waiting: int
    """Refreshes that wait."""
    queue_depth_active: int
    """Sequences whose refresh has been planned and whose block has not ended."""
    outstanding_prefill_tokens: int
    """Canvas tokens of the blocks in this worker."""
    decode_length_sum: int
    """Canvas tokens of the active sequences."""
    pages_used: int
    pages_total: int
    deficit_tokens: int


@dataclass(frozen=True, slots=True)
class BatchExecuted(Event):
    """One engine iteration; `at_s` is its completion."""

    kind: ClassVar[str] = "batch_executed"
    worker_id: int
    start_s: float
    """max(its launch, the previous completion)."""
    batch_size: int
    batch_prompt_len: int
    """Refresh rows."""
    batch_gen_len: int
    """Decode rows, void ones included."""
    batch_num_void_tokens: int
    batch_num_unmasked_tokens: int
    batch_decode_length_std: float | None
    """Population standard deviation of the decoding canvases; None below two."""
    batch_sampling_time: float
    batch_op_attn_time: float | None = None
    """Of all layers, as the other two; None where the batch was not sampled."""
    batch_op_mlp_time: float | None = None
    batch_op_qkv_time: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerUp(Event):
    """A worker is ready."""

    kind: ClassVar[str] = "worker_up"
    worker_id: int
    device: str
    pages_total: int
    kv_page_size: int
    pid: int
    worker_type: str = "colocated"
    """colocated, or prefill: it only refreshes."""


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker's stream ended before it was asked to end."""

    kind: ClassVar[str] = "worker_lost"
    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker's stream ended as it was meant to: it was drained."""

    kind: ClassVar[str] = "worker_left"
    worker_id: int


EVENT_TYPES: dict[str, type[Event]] = {
    t.kind: t
    for t in (
        RunStarted,
        LoadDrawn,
        RequestSent,
        RequestDone,
        RunEnded,
        ServerStarted,
        ServerEnded,
        RequestArrived,
        BlockRouted,
        BlockFinished,
        RequestFinished,
        SchedulerDepth,
        WorkerState,
        BatchExecuted,
        WorkerUp,
        WorkerLost,
        WorkerLeft,
    )
}

FIELD_NAMES: dict[str, tuple[str, ...]] = {kind: tuple(f.name for f in fields(t)) for kind, t in EVENT_TYPES.items()}
"""Kind -> fields; dataclasses.asdict copies deeply and takes four times as long for a block."""

_READ_FIELDS = {kind: attrgetter(*names) for kind, names in FIELD_NAMES.items()}
"""Kind -> what reads all fields of such an event, in the order of FIELD_NAMES."""

_MOMENT_NAMES = {
    kind: tuple(name for name in names if name.endswith("_s") and name != "unix_s")
    for kind, names in FIELD_NAMES.items()
}


def _names_of(type_name: str) -> dict[str, tuple[str, ...]]:
    """Kind -> fields whose annotation begins with this."""
    return {
        kind: tuple(f.name for f in fields(t) if str(f.type).startswith(type_name)) for kind, t in EVENT_TYPES.items()
    }


_NUMBER_NAMES = _names_of("float")
"""Kind -> fields that JSON may hold as text: "inf" and its like."""

_TUPLE_NAMES = _names_of("tuple")
"""Kind -> fields that JSON holds as lists."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event_to_json(event: Event) -> str:
    """One line without a newline; non-finite numbers as the strings "inf", "-inf", "nan"."""
    record = {"kind": event.kind, **{name: finite_or_text(value) for name, value in _values(event).items()}}
    return _encode(record)


def event_from_json(line: str) -> Event:
    """The inverse of event_to_json. Raises ValueError for anything that is no event of this schema."""
    return event_from_record(json.loads(line))


def event_from_record(record: Any) -> Event:
    """The event in a parsed line, which is used up. Raises ValueError as event_from_json does."""
    if not isinstance(record, dict):
        raise ValueError(f"an event is a JSON object, got {type(record).__name__}")
    kind = record.pop("kind", None)
    if kind not in EVENT_TYPES:
        raise ValueError(f"unknown event kind {kind!r}")
    try:
        for name in _NUMBER_NAMES[kind]:
            if record.get(name).__class__ is str:
                record[name] = float(record[name])
        for name in _TUPLE_NAMES[kind]:
            record[name] = tuple(record[name])
        return EVENT_TYPES[kind](**record)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"event {kind}: {error}") from None


def shifted(event: Event, offset_s: float) -> Event:
    """The event on another clock: every field that ends in _s is a moment, but for unix_s, and moves by `offset_s`."""
    values = _values(event)
    return replace(event, **{name: _moved(values[name], offset_s) for name in _MOMENT_NAMES[event.kind]})


def _values(event: Event) -> dict[str, Any]:
    return dict(zip(FIELD_NAMES[event.kind], _READ_FIELDS[event.kind](event), strict=True))


def _moved(moment: Any, offset_s: float) -> Any:
    if moment is None:
        return None
    if isinstance(moment, tuple):
        return tuple(m + offset_s for m in moment)
    return moment + offset_s
