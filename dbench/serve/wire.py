"""What crosses the wire between a server and its clients: records, and their protobuf messages.

This module and wire_link.py are the only places that convert between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dbench.errors import OptionError, RequestError
from dbench.options import COLOCATED
from dbench.progress import WorkerProgress
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.sequence import SamplingParameters
from dbench.unmasking_rules import RULE_PARAMETERS

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Both ways, on every channel: a canvas of a million ids fits four times."""

NOT_FOUND = "NOT_FOUND"
"""The status string that Poll and Cancel give for an unknown request id."""

AUTHORIZATION = "authorization"
"""Metadata key that carries the API key."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the client wrote it, before validation."""

    prompt_token_ids: tuple[int, ...]
    gen_length: int
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    request_seed: int | None = None
    """None: derived from the request, so that equal requests get equal randomness."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class PollState:
    """A request as its client sees it: finished blocks only. Times are the server's monotonic clock."""

    status: str
    """A Status, or NOT_FOUND with everything else empty."""
    sequence: tuple[int, ...] = ()
    """The prompt, then the canvas, with the mask id where nothing is fixed yet."""
    num_prompt_tokens: int = 0
    num_forward_passes: int = 0
    """Of finished blocks."""
    error_message: str = ""
    arrival_s: float = 0.0
    first_refresh_s: float | None = None
    """Start of the first refresh; known once a block has ended."""
    completion_s: float | None = None
    generated_token_ids: tuple[int, ...] = ()
    """Of a COMPLETED request, ending with the first end-of-text id unless ignore_eos."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first reply of Generate."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FinishedBlock:
    """The ids of one finished block, cut after the first end-of-text id unless ignore_eos."""

    block_index: int
    token_ids: tuple[int, ...]


GenerateReply = Accepted | FinishedBlock | PollState
"""In this order: one Accepted, the finished blocks from index 0, one PollState with the final status."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker at one moment; counters run from its start."""

    worker_id: int
    kind: str
    device: str
    ready: bool
    state: str
    """awaited, starting, idle, queued, busy, draining, ended or lost."""
    pages_total: int
    pages_used: int
    kv_page_size: int
    queue_depth_waiting: int
    queue_depth_active: int
    outstanding_prefill_tokens: int
    num_iterations: int
    num_forward_passes: int
    num_unmasked_tokens: int
    pid: int
    num_losses: int = 0
    """Times that it was lost, whether or not it came back."""
    metrics_address: str = ""
    """host:port of its health and metrics, as its own host calls it; empty for none."""


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The workers of one kind."""

    kind: str
    expected: int
    """That the server waited for when it started."""
    ready: int
    """Of all that are there, those that joined later among them."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What GetServerStatus says."""

    version: str
    ready_for_requests: bool
    model: str
    block_length: int
    max_gen_len: int | None
    max_model_len: int
    vocabulary_size: int
    reserved_token_ids: tuple[int, ...]
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    workers: tuple[WorkerStatus, ...]
    resolved_config_json: str
    environment_json: str
    now_s: float
    """The server's monotonic clock when it answered."""
    num_requests_in_server: int
    tokenizer: str
    metrics_output_dir: str
    worker_counts: tuple[WorkerCount, ...]
    """One per kind that the server's mode has."""


@dataclass(frozen=True, slots=True)
class EventLines:
    """A part of an export: lines as in events.jsonl, on the server's clock."""

    lines: tuple[str, ...]
    num_forgotten: int


def bearer(api_key: str) -> str:
    """The value of AUTHORIZATION. Raises OptionError for a key that no header can carry."""
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip() and api_key):
        raise OptionError(
            "api_key: holds characters that no header can carry; use printable ASCII without spaces around"
        )
    return f"Bearer {api_key}"


def worker_progress(worker: WorkerStatus) -> WorkerProgress:
    """The worker as a row of a live view."""
    return WorkerProgress(
        worker_id=worker.worker_id,
        device=worker.device if worker.kind == COLOCATED else f"{worker.device} ({worker.kind})",
        state=worker.state,
        queue_depth_waiting=worker.queue_depth_waiting,
        queue_depth_active=worker.queue_depth_active,
        pages_used=worker.pages_used,
        pages_total=worker.pages_total,
        num_forward_passes=worker.num_forward_passes,
        num_unmasked_tokens=worker.num_unmasked_tokens,
        num_losses=worker.num_losses,
    )


def sampling_to_message(sampling: SamplingParameters) -> pb.SamplingParameters:
    parameters: dict[str, Any] = {**sampling.parameters()}
    return pb.SamplingParameters(
        temperature=sampling.temperature, unmasking_strategy=sampling.unmasking_strategy, **parameters
    )


def sampling_from_message(message: pb.SamplingParameters) -> SamplingParameters:
    """Absent fields take the record's defaults."""
    names = ("temperature", "unmasking_strategy", *RULE_PARAMETERS)
    return SamplingParameters(**{name: getattr(message, name) for name in names if message.HasField(name)})


def submission_to_message(submission: Submission) -> pb.GenerationRequest:
    """Raises RequestError for a number that the wire cannot carry."""
    try:
        return pb.GenerationRequest(
            prompt_token_ids=submission.prompt_token_ids,
            gen_length=submission.gen_length,
            request_seed=submission.request_seed,
            ignore_eos=submission.ignore_eos,
            sampling_parameters=sampling_to_message(submission.sampling),
        )
    except ValueError as error:
        raise RequestError(f"request: {error}; token ids and gen_length are int32, request_seed is int64") from None


def submission_from_message(message: pb.GenerationRequest) -> Submission:
    return Submission(
        prompt_token_ids=tuple(message.prompt_token_ids),
        gen_length=message.gen_length,
        sampling=sampling_from_message(message.sampling_parameters),
        request_seed=message.request_seed if message.HasField("request_seed") else None,
        ignore_eos=message.ignore_eos,
    )


def poll_state_to_message(state: PollState) -> pb.PollReply:
    return pb.PollReply(
        status=state.status,
        sequence=state.sequence,
        num_prompt_tokens=state.num_prompt_tokens,
        num_forward_passes=state.num_forward_passes,
        error_message=state.error_message,
        arrival_s=state.arrival_s,
        first_refresh_s=state.first_refresh_s,
        completion_s=state.completion_s,
        generated_token_ids=state.generated_token_ids,
    )


def poll_state_from_message(message: pb.PollReply) -> PollState:
    return PollState(
        status=message.status,
        sequence=tuple(message.sequence),
        num_prompt_tokens=message.num_prompt_tokens,
        num_forward_passes=message.num_forward_passes,
        error_message=message.error_message,
        arrival_s=message.arrival_s,
        first_refresh_s=message.first_refresh_s if message.HasField("first_refresh_s") else None,
        completion_s=message.completion_s if message.HasField("completion_s") else None,
        generated_token_ids=tuple(message.generated_token_ids),
    )


def generate_reply_to_message(reply: GenerateReply) -> pb.GenerateReply:
    match reply:
        case Accepted(request_id):
            return pb.GenerateReply(accepted_request_id=request_id)
        case FinishedBlock(block_index, token_ids):
            return pb.GenerateReply(block=pb.FinishedBlock(block_index=block_index, token_ids=token_ids))
        case PollState():
            return pb.GenerateReply(result=poll_state_to_message(reply))


def generate_reply_from_message(message: pb.GenerateReply) -> GenerateReply:
    """Raises ValueError for an empty reply."""
    match message.WhichOneof("reply"):
        case "accepted_request_id":
            return Accepted(message.accepted_request_id)
        case "block":
            return FinishedBlock(message.block.block_index, tuple(message.block.token_ids))
        case "result":
            return poll_state_from_message(message.result)
        case other:
            raise ValueError(f"a reply of Generate holds accepted_request_id, block or result, got {other}")


def worker_status_to_message(worker: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        kind=worker.kind,
        device=worker.device,
        ready=worker.ready,
        state=worker.state,
        pages_total=worker.pages_total,
        pages_used=worker.pages_used,
        kv_page_size=worker.kv_page_size,
        queue_depth_waiting=worker.queue_depth_waiting,
        queue_depth_active=worker.queue_depth_active,
        outstanding_prefill_tokens=worker.outstanding_prefill_tokens,
        num_iterations=worker.num_iterations,
        num_forward_passes=worker.num_forward_passes,
        num_unmasked_tokens=worker.num_unmasked_tokens,
        pid=worker.pid,
        num_losses=worker.num_losses,
        metrics_address=worker.metrics_address,
    )


def worker_status_from_message(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker_id=message.worker_id,
        kind=message.kind,
        device=message.device,
        ready=message.ready,
        state=message.state,
        pages_total=message.pages_total,
        pages_used=message.pages_used,
        kv_page_size=message.kv_page_size,
        queue_depth_waiting=message.queue_depth_waiting,
        queue_depth_active=message.queue_depth_active,
        outstanding_prefill_tokens=message.outstanding_prefill_tokens,
        num_iterations=message.num_iterations,
        num_forward_passes=message.num_forward_passes,
        num_unmasked_tokens=message.num_unmasked_tokens,
        pid=message.pid,
        num_losses=message.num_losses,
        metrics_address=message.metrics_address,
    )


def server_status_to_message(status: ServerStatus) -> pb.ServerStatusReply:
    return pb.ServerStatusReply(
        version=status.version,
        ready_for_requests=status.ready_for_requests,
        model=status.model,
        block_length=status.block_length,
        max_gen_len=status.max_gen_len,
        max_model_len=status.max_model_len,
        vocabulary_size=status.vocabulary_size,
        reserved_token_ids=status.reserved_token_ids,
        mask_token_id=status.mask_token_id,
        eos_token_ids=status.eos_token_ids,
        workers=[worker_status_to_message(worker) for worker in status.workers],
        resolved_config_json=status.resolved_config_json,
        environment_json=status.environment_json,
        now_s=status.now_s,
        num_requests_in_server=status.num_requests_in_server,
        tokenizer=status.tokenizer,
        metrics_output_dir=status.metrics_output_dir,
        worker_counts=[pb.WorkerCount(kind=c.kind, expected=c.expected, ready=c.ready) for c in status.worker_counts],
    )


def server_status_from_message(message: pb.ServerStatusReply) -> ServerStatus:
    return ServerStatus(
        version=message.version,
        ready_for_requests=message.ready_for_requests,
        model=message.model,
        block_length=message.block_length,
        max_gen_len=message.max_gen_len if message.HasField("max_gen_len") else None,
        max_model_len=message.max_model_len,
        vocabulary_size=message.vocabulary_size,
        reserved_token_ids=tuple(message.reserved_token_ids),
        mask_token_id=message.mask_token_id,
        eos_token_ids=tuple(message.eos_token_ids),
        workers=tuple(worker_status_from_message(worker) for worker in message.workers),
        resolved_config_json=message.resolved_config_json,
        environment_json=message.environment_json,
        now_s=message.now_s,
        num_requests_in_server=message.num_requests_in_server,
        tokenizer=message.tokenizer,
        metrics_output_dir=message.metrics_output_dir,
        worker_counts=tuple(WorkerCount(c.kind, c.expected, c.ready) for c in message.worker_counts),
    )


def event_lines_to_message(part: EventLines) -> pb.EventBatch:
    return pb.EventBatch(event_json=part.lines, num_forgotten=part.num_forgotten)


def event_lines_from_message(message: pb.EventBatch) -> EventLines:
    return EventLines(tuple(message.event_json), message.num_forgotten)
