"""What crosses the wire between a scheduler and its workers: records, and their protobuf messages.

A worker dials in and says Hello; the scheduler answers Welcome, with the options that all workers share;
the worker loads its model and says Ready; from then on blocks and cancels go down, and one EngineProgress
per iteration comes up. A worker that wants to end says Leaving and is drained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from dbench import __version__
from dbench.config import options_from_dict, options_to_dict
from dbench.errors import OptionError
from dbench.options import COLOCATED, EngineOptions
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.sequence import (
    BlockEnd,
    BlockKey,
    BlockOutcome,
    BlockStep,
    BlockTask,
    BlockTimes,
    Fault,
    HandedOver,
    RefreshTimes,
)
from dbench.serve.wire import sampling_from_message, sampling_to_message


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message."""

    worker_key: str = field(repr=False)
    worker_id: int | None
    """None: from elsewhere, not started by the server, which gives it one."""
    device: str
    pid: int
    version: str = __version__
    host: str = ""
    """Where it runs, if that is elsewhere."""
    instance: str = ""
    """The same whenever one process dials, so that it is given the worker id that it had."""
    kind: str = COLOCATED
    """What a worker from elsewhere wants to be: COLOCATED or PREFILL."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and has run one forward pass."""

    pages_total: int
    kv_page_size: int
    max_model_len: int
    metrics_address: str = ""
    """host:port of the worker's health and metrics; empty for none."""


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """What one iteration brought, or, with nothing in it, a heartbeat."""

    now_s: float
    """The worker's monotonic clock when it was sent."""
    iteration: int
    """The last one that ended."""
    refreshed: tuple[BlockKey, ...] = ()
    ended: tuple[BlockEnd, ...] = ()
    event_lines: tuple[str, ...] = ()
    """Events as JSON since the last message, on the worker's clock."""
    iteration_age_s: float | None = None
    """How long the next iteration has been running; None when none runs."""
    reserved: tuple[BlockKey, ...] = ()
    """Blocks for which pages were taken."""
    handed_over: tuple[HandedOver, ...] = ()
    """Blocks whose KV has been sent and whose pages are free."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The worker cannot go on."""

    error: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker wants to end: it takes nothing new and waits for its Drain."""


WorkerMessage = Hello | Ready | EngineProgress | Fatal | Leaving


@dataclass(frozen=True, slots=True)
class Welcome:
    """The scheduler has taken the worker in, and says what all its workers do alike."""

    worker_id: int
    engine: EngineOptions
    """Resolved."""
    model_fingerprint: str
    """Of the server's model files."""
    kind: str = COLOCATED
    """COLOCATED or PREFILL."""
    meeting_address: str = ""
    """host:port of the store at which workers meet that exchange KV; empty in colocated mode."""


@dataclass(frozen=True, slots=True)
class RunBlock:
    """Refresh and decode it; a prefill worker refreshes it and keeps its pages until they have been sent."""

    task: BlockTask


@dataclass(frozen=True, slots=True)
class ReserveBlock:
    """Take pages for a block that the sender refreshes, and await its KV."""

    task: BlockTask
    sender_id: int
    epoch: int
    """Of the link between the two; a new one after every failure."""


@dataclass(frozen=True, slots=True)
class SendBlock:
    """The receiver has pages: send the block's KV there, layer by layer as they are written."""

    key: BlockKey
    receiver_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CancelBlock:
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, hand back what waits as CANCELLED, take nothing new, then close the stream."""


Command = Welcome | RunBlock | ReserveBlock | SendBlock | CancelBlock | Drain


def worker_message_to_message(record: WorkerMessage) -> pb.WorkerMessage:
    match record:
        case Hello():
            return pb.WorkerMessage(
                hello=pb.Hello(
                    worker_key=record.worker_key,
                    worker_id=record.worker_id,
                    device=record.device,
                    pid=record.pid,
                    version=record.version,
                    host=record.host,
                    instance=record.instance,
                    kind=record.kind,
                )
            )
        case Ready():
            ready = pb.Ready(
                pages_total=record.pages_total,
                kv_page_size=record.kv_page_size,
                max_model_len=record.max_model_len,
                metrics_address=record.metrics_address,
            )
            return pb.WorkerMessage(ready=ready)
        case EngineProgress():
            return pb.WorkerMessage(
                progress=pb.Progress(
                    now_s=record.now_s,
                    iteration=record.iteration,
                    refreshed=[_key_to_message(key) for key in record.refreshed],
                    ended=[_end_to_message(end) for end in record.ended],
                    event_json=record.event_lines,
                    iteration_age_s=record.iteration_age_s,
                    reserved=[_key_to_message(key) for key in record.reserved],
                    handed_over=[
                        pb.HandedOver(key=_key_to_message(sent.key), epoch=sent.epoch) for sent in record.handed_over
                    ],
                )
            )
        case Fatal(error):
            return pb.WorkerMessage(fatal=error)
        case Leaving():
            return pb.WorkerMessage(leaving=pb.Leaving())


def worker_message_from_message(message: pb.WorkerMessage) -> WorkerMessage:
    """Raises ValueError for an empty message."""
    match message.WhichOneof("message"):
        case "hello":
            return _hello_from_message(message.hello)
        case "ready":
            ready = message.ready
            return Ready(ready.pages_total, ready.kv_page_size, ready.max_model_len, ready.metrics_address)
        case "progress":
            progress = message.progress
            return EngineProgress(
                now_s=progress.now_s,
                iteration=progress.iteration,
                refreshed=tuple(_key_from_message(key) for key in progress.refreshed),
                ended=tuple(_end_from_message(end) for end in progress.ended),
                event_lines=tuple(progress.event_json),
                iteration_age_s=progress.iteration_age_s if progress.HasField("iteration_age_s") else None,
                reserved=tuple(_key_from_message(key) for key in progress.reserved),
                handed_over=tuple(HandedOver(_key_from_message(sent.key), sent.epoch) for sent in progress.handed_over),
            )
        case "fatal":
            return Fatal(message.fatal)
        case "leaving":
            return Leaving()
        case other:
            raise ValueError(f"a worker's message holds hello, ready, progress, fatal or leaving, got {other}")


def command_to_message(command: Command) -> pb.SchedulerCommand:
    match command:
        case Welcome():
            welcome = pb.Welcome(
                worker_id=command.worker_id,
                engine_json=json.dumps(options_to_dict(command.engine)),
                model_fingerprint=command.model_fingerprint,
                kind=command.kind,
                meeting_address=command.meeting_address,
            )
            return pb.SchedulerCommand(welcome=welcome)
        case RunBlock(task):
            return pb.SchedulerCommand(run=_task_to_message(task))
        case ReserveBlock(task, sender_id, epoch):
            reserve = pb.ReserveBlock(task=_task_to_message(task), sender_id=sender_id, epoch=epoch)
            return pb.SchedulerCommand(reserve=reserve)
        case SendBlock(key, receiver_id, epoch):
            send = pb.SendBlock(key=_key_to_message(key), receiver_id=receiver_id, epoch=epoch)
            return pb.SchedulerCommand(send=send)
        case CancelBlock(key):
            return pb.SchedulerCommand(cancel=_key_to_message(key))
        case Drain():
            return pb.SchedulerCommand(drain=pb.Drain())


def command_from_message(message: pb.SchedulerCommand) -> Command:
    """Raises ValueError for an empty command, and for options that this version does not know."""
    match message.WhichOneof("command"):
        case "welcome":
            return _welcome_from_message(message.welcome)
        case "run":
            return RunBlock(_task_from_message(message.run))
        case "reserve":
            reserve = message.reserve
            return ReserveBlock(_task_from_message(reserve.task), reserve.sender_id, reserve.epoch)
        case "send":
            return SendBlock(_key_from_message(message.send.key), message.send.receiver_id, message.send.epoch)
        case "cancel":
            return CancelBlock(_key_from_message(message.cancel))
        case "drain":
            return Drain()
        case other:
            raise ValueError(f"a command holds welcome, run, reserve, send, cancel or drain, got {other}")


def _hello_from_message(message: pb.Hello) -> Hello:
    return Hello(
        message.worker_key,
        message.worker_id if message.HasField("worker_id") else None,
        message.device,
        message.pid,
        message.version,
        message.host,
        message.instance,
        message.kind,
    )


def _welcome_from_message(message: pb.Welcome) -> Welcome:
    try:
        engine = options_from_dict(EngineOptions, json.loads(message.engine_json))
    except (ValueError, OptionError) as error:
        raise ValueError(f"the welcome's options cannot be read: {error}") from None
    return Welcome(message.worker_id, engine, message.model_fingerprint, message.kind, message.meeting_address)


def _key_to_message(key: BlockKey) -> pb.BlockKey:
    return pb.BlockKey(request_id=key.request_id, block_index=key.block_index, attempt=key.attempt)


def _key_from_message(message: pb.BlockKey) -> BlockKey:
    return BlockKey(message.request_id, message.block_index, message.attempt)


def _task_to_message(task: BlockTask) -> pb.BlockTask:
    return pb.BlockTask(
        key=_key_to_message(task.key),
        token_ids=task.token_ids,
        num_masks=task.num_masks,
        block_length=task.block_length,
        sampling=sampling_to_message(task.sampling),
        request_seed=task.request_seed,
        ignore_eos=task.ignore_eos,
        arrival_s=task.arrival_s,
        num_remaining_blocks=task.num_remaining_blocks,
        alone=task.alone,
    )


def _task_from_message(message: pb.BlockTask) -> BlockTask:
    return BlockTask(
        key=_key_from_message(message.key),
        token_ids=tuple(message.token_ids),
        num_masks=message.num_masks,
        block_length=message.block_length,
        sampling=sampling_from_message(message.sampling),
        request_seed=message.request_seed,
        ignore_eos=message.ignore_eos,
        arrival_s=message.arrival_s,
        num_remaining_blocks=message.num_remaining_blocks,
        alone=message.alone,
    )


def _end_to_message(end: BlockEnd) -> pb.BlockEnd:
    times = end.times
    return pb.BlockEnd(
        key=_key_to_message(end.key),
        outcome=end.outcome.value,
        token_ids=end.token_ids,
        found_eos=end.found_eos,
        error=end.error,
        times=None
        if times is None
        else pb.BlockTimes(
            received_s=times.received_s,
            refresh_start_s=times.refresh_start_s,
            refresh_end_s=times.refresh_end_s,
            decode_start_s=times.decode_start_s,
            end_s=times.end_s,
        ),
        steps=[pb.BlockStep(end_s=step.end_s, num_unmasked=step.num_unmasked) for step in end.steps],
        fault=end.fault.value,
        refreshed_elsewhere=_refresh_times_to_message(end.refreshed_elsewhere),
        link_epoch=end.link_epoch,
    )


def _end_from_message(message: pb.BlockEnd) -> BlockEnd:
    times = message.times
    return BlockEnd(
        key=_key_from_message(message.key),
        outcome=BlockOutcome(message.outcome),
        token_ids=tuple(message.token_ids),
        found_eos=message.found_eos,
        error=message.error,
        times=BlockTimes(
            times.received_s, times.refresh_start_s, times.refresh_end_s, times.decode_start_s, times.end_s
        )
        if message.HasField("times")
        else None,
        steps=tuple(BlockStep(step.end_s, step.num_unmasked) for step in message.steps),
        fault=Fault(message.fault),
        refreshed_elsewhere=_refresh_times_from_message(message.refreshed_elsewhere)
        if message.HasField("refreshed_elsewhere")
        else None,
        link_epoch=message.link_epoch,
    )


def _refresh_times_to_message(times: RefreshTimes | None) -> pb.RefreshTimes | None:
    if times is None:
        return None
    return pb.RefreshTimes(
        worker_id=times.worker_id,
        received_s=times.received_s,
        refresh_start_s=times.refresh_start_s,
        refresh_end_s=times.refresh_end_s,
        transfer_start_s=times.transfer_start_s,
    )


def _refresh_times_from_message(message: pb.RefreshTimes) -> RefreshTimes:
    return RefreshTimes(
        message.worker_id,
        message.received_s,
        message.refresh_start_s,
        message.refresh_end_s,
        message.transfer_start_s,
    )
