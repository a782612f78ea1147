from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "unmasking_strategy", "confidence_threshold", "fixed_unmask_quota", "dynamic_unmask_factor", "entropy_threshold", "margin_threshold")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    UNMASKING_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    FIXED_UNMASK_QUOTA_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_UNMASK_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MARGIN_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    unmasking_strategy: str
    confidence_threshold: float
    fixed_unmask_quota: int
    dynamic_unmask_factor: float
    entropy_threshold: float
    margin_threshold: float
    def __init__(self, temperature: _Optional[float] = ..., unmasking_strategy: _Optional[str] = ..., confidence_threshold: _Optional[float] = ..., fixed_unmask_quota: _Optional[int] = ..., dynamic_unmask_factor: _Optional[float] = ..., entropy_threshold: _Optional[float] = ..., margin_threshold: _Optional[float] = ...) -> None: ...

class GenerationRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "gen_length", "request_seed", "ignore_eos", "sampling_parameters")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GEN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    gen_length: int
    request_seed: int
    ignore_eos: bool
    sampling_parameters: SamplingParameters
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., gen_length: _Optional[int] = ..., request_seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., sampling_parameters: _Optional[_Union[SamplingParameters, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class PollReply(_message.Message):
    __slots__ = ("status", "sequence", "num_prompt_tokens", "num_forward_passes", "error_message", "arrival_s", "first_refresh_s", "completion_s", "generated_token_ids")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_REFRESH_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    status: str
    sequence: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_forward_passes: int
    error_message: str
    arrival_s: float
    first_refresh_s: float
    completion_s: float
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, status: _Optional[str] = ..., sequence: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_forward_passes: _Optional[int] = ..., error_message: _Optional[str] = ..., arrival_s: _Optional[float] = ..., first_refresh_s: _Optional[float] = ..., completion_s: _Optional[float] = ..., generated_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("accepted_request_id", "block", "result")
    ACCEPTED_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    accepted_request_id: str
    block: FinishedBlock
    result: PollReply
    def __init__(self, accepted_request_id: _Optional[str] = ..., block: _Optional[_Union[FinishedBlock, _Mapping]] = ..., result: _Optional[_Union[PollReply, _Mapping]] = ...) -> None: ...

class FinishedBlock(_message.Message):
    __slots__ = ("block_index", "token_ids")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...

class ServerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerStatusReply(_message.Message):
    __slots__ = ("version", "ready_for_requests", "model", "block_length", "max_gen_len", "max_model_len", "vocabulary_size", "reserved_token_ids", "mask_token_id", "eos_token_ids", "workers", "resolved_config_json", "environment_json", "now_s", "num_requests_in_server", "tokenizer", "metrics_output_dir", "worker_counts")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    READY_FOR_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_GEN_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_SERVER_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    METRICS_OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    ready_for_requests: bool
    model: str
    block_length: int
    max_gen_len: int
    max_model_len: int
    vocabulary_size: int
    reserved_token_ids: _containers.RepeatedScalarFieldContainer[int]
    mask_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    resolved_config_json: str
    environment_json: str
    now_s: float
    num_requests_in_server: int
    tokenizer: str
    metrics_output_dir: str
    worker_counts: _containers.RepeatedCompositeFieldContainer[WorkerCount]
    def __init__(self, version: _Optional[str] = ..., ready_for_requests: _Optional[bool] = ..., model: _Optional[str] = ..., block_length: _Optional[int] = ..., max_gen_len: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., reserved_token_ids: _Optional[_Iterable[int]] = ..., mask_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., resolved_config_json: _Optional[str] = ..., environment_json: _Optional[str] = ..., now_s: _Optional[float] = ..., num_requests_in_server: _Optional[int] = ..., tokenizer: _Optional[str] = ..., metrics_output_dir: _Optional[str] = ..., worker_counts: _Optional[_Iterable[_Union[WorkerCount, _Mapping]]] = ...) -> None: ...

class WorkerCount(_message.Message):
    __slots__ = ("kind", "expected", "ready")
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    expected: int
    ready: int
    def __init__(self, kind: _Optional[str] = ..., expected: _Optional[int] = ..., ready: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "kind", "device", "ready", "state", "pages_total", "pages_used", "kv_page_size", "queue_depth_waiting", "queue_depth_active", "outstanding_prefill_tokens", "num_iterations", "num_forward_passes", "num_unmasked_tokens", "pid", "num_losses", "metrics_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_UNMASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    kind: str
    device: str
    ready: bool
    state: str
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
    num_losses: int
    metrics_address: str
    def __init__(self, worker_id: _Optional[int] = ..., kind: _Optional[str] = ..., device: _Optional[str] = ..., ready: _Optional[bool] = ..., state: _Optional[str] = ..., pages_total: _Optional[int] = ..., pages_used: _Optional[int] = ..., kv_page_size: _Optional[int] = ..., queue_depth_waiting: _Optional[int] = ..., queue_depth_active: _Optional[int] = ..., outstanding_prefill_tokens: _Optional[int] = ..., num_iterations: _Optional[int] = ..., num_forward_passes: _Optional[int] = ..., num_unmasked_tokens: _Optional[int] = ..., pid: _Optional[int] = ..., num_losses: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class ResetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetMetricsReply(_message.Message):
    __slots__ = ("now_s",)
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    now_s: float
    def __init__(self, now_s: _Optional[float] = ...) -> None: ...

class ExportMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("event_json", "num_forgotten")
    EVENT_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    event_json: _containers.RepeatedScalarFieldContainer[str]
    num_forgotten: int
    def __init__(self, event_json: _Optional[_Iterable[str]] = ..., num_forgotten: _Optional[int] = ...) -> None: ...

class BlockKey(_message.Message):
    __slots__ = ("request_id", "block_index", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    block_index: int
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., block_index: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class BlockTask(_message.Message):
    __slots__ = ("key", "token_ids", "num_masks", "block_length", "sampling", "request_seed", "ignore_eos", "arrival_s", "num_remaining_blocks", "alone")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_MASKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_masks: int
    block_length: int
    sampling: SamplingParameters
    request_seed: int
    ignore_eos: bool
    arrival_s: float
    num_remaining_blocks: int
    alone: bool
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_masks: _Optional[int] = ..., block_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., request_seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., arrival_s: _Optional[float] = ..., num_remaining_blocks: _Optional[int] = ..., alone: _Optional[bool] = ...) -> None: ...

class SchedulerCommand(_message.Message):
    __slots__ = ("welcome", "run", "cancel", "drain", "reserve", "send")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    run: BlockTask
    cancel: BlockKey
    drain: Drain
    reserve: ReserveBlock
    send: SendBlock
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., run: _Optional[_Union[BlockTask, _Mapping]] = ..., cancel: _Optional[_Union[BlockKey, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., reserve: _Optional[_Union[ReserveBlock, _Mapping]] = ..., send: _Optional[_Union[SendBlock, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "engine_json", "model_fingerprint", "kind", "meeting_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEETING_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    engine_json: str
    model_fingerprint: str
    kind: str
    meeting_address: str
    def __init__(self, worker_id: _Optional[int] = ..., engine_json: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kind: _Optional[str] = ..., meeting_address: _Optional[str] = ...) -> None: ...

class ReserveBlock(_message.Message):
    __slots__ = ("task", "sender_id", "epoch")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    task: BlockTask
    sender_id: int
    epoch: int
    def __init__(self, task: _Optional[_Union[BlockTask, _Mapping]] = ..., sender_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SendBlock(_message.Message):
    __slots__ = ("key", "receiver_id", "epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    receiver_id: int
    epoch: int
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., receiver_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "ready", "progress", "fatal", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    progress: Progress
    fatal: str
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., fatal: _Optional[str] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_key", "worker_id", "device", "pid", "version", "host", "instance", "kind")
    WORKER_KEY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    worker_key: str
    worker_id: int
    device: str
    pid: int
    version: str
    host: str
    instance: str
    kind: str
    def __init__(self, worker_key: _Optional[str] = ..., worker_id: _Optional[int] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., host: _Optional[str] = ..., instance: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ready(_message.Message):
    __slots__ = ("pages_total", "kv_page_size", "max_model_len", "metrics_address")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    kv_page_size: int
    max_model_len: int
    metrics_address: str
    def __init__(self, pages_total: _Optional[int] = ..., kv_page_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("now_s", "iteration", "refreshed", "ended", "event_json", "iteration_age_s", "reserved", "handed_over")
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    REFRESHED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    EVENT_JSON_FIELD_NUMBER: _ClassVar[int]
    ITERATION_AGE_S_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    now_s: float
    iteration: int
    refreshed: _containers.RepeatedCompositeFieldContainer[BlockKey]
    ended: _containers.RepeatedCompositeFieldContainer[BlockEnd]
    event_json: _containers.RepeatedScalarFieldContainer[str]
    iteration_age_s: float
    reserved: _containers.RepeatedCompositeFieldContainer[BlockKey]
    handed_over: _containers.RepeatedCompositeFieldContainer[HandedOver]
    def __init__(self, now_s: _Optional[float] = ..., iteration: _Optional[int] = ..., refreshed: _Optional[_Iterable[_Union[BlockKey, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[BlockEnd, _Mapping]]] = ..., event_json: _Optional[_Iterable[str]] = ..., iteration_age_s: _Optional[float] = ..., reserved: _Optional[_Iterable[_Union[BlockKey, _Mapping]]] = ..., handed_over: _Optional[_Iterable[_Union[HandedOver, _Mapping]]] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("key", "epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    epoch: int
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class BlockEnd(_message.Message):
    __slots__ = ("key", "outcome", "token_ids", "found_eos", "error", "times", "steps", "fault", "refreshed_elsewhere", "link_epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FOUND_EOS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    REFRESHED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    LINK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    outcome: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    found_eos: bool
    error: str
    times: BlockTimes
    steps: _containers.RepeatedCompositeFieldContainer[BlockStep]
    fault: str
    refreshed_elsewhere: RefreshTimes
    link_epoch: int
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., outcome: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., found_eos: _Optional[bool] = ..., error: _Optional[str] = ..., times: _Optional[_Union[BlockTimes, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[BlockStep, _Mapping]]] = ..., fault: _Optional[str] = ..., refreshed_elsewhere: _Optional[_Union[RefreshTimes, _Mapping]] = ..., link_epoch: _Optional[int] = ...) -> None: ...

class RefreshTimes(_message.Message):
    __slots__ = ("worker_id", "received_s", "refresh_start_s", "refresh_end_s", "transfer_start_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    REFRESH_START_S_FIELD_NUMBER: _ClassVar[int]
    REFRESH_END_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_START_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    received_s: float
    refresh_start_s: float
    refresh_end_s: float
    transfer_start_s: float
    def __init__(self, worker_id: _Optional[int] = ..., received_s: _Optional[float] = ..., refresh_start_s: _Optional[float] = ..., refresh_end_s: _Optional[float] = ..., transfer_start_s: _Optional[float] = ...) -> None: ...

class BlockTimes(_message.Message):
    __slots__ = ("received_s", "refresh_start_s", "refresh_end_s", "decode_start_s", "end_s")
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    REFRESH_START_S_FIELD_NUMBER: _ClassVar[int]
    REFRESH_END_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    received_s: float
    refresh_start_s: float
    refresh_end_s: float
    decode_start_s: float
    end_s: float
    def __init__(self, received_s: _Optional[float] = ..., refresh_start_s: _Optional[float] = ..., refresh_end_s: _Optional[float] = ..., decode_start_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class BlockStep(_message.Message):
    __slots__ = ("end_s", "num_unmasked")
    END_S_FIELD_NUMBER: _ClassVar[int]
    NUM_UNMASKED_FIELD_NUMBER: _ClassVar[int]
    end_s: float
    num_unmasked: int
    def __init__(self, end_s: _Optional[float] = ..., num_unmasked: _Optional[int] = ...) -> None: ...
