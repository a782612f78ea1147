"""Records survive the wire unchanged, and what the wire cannot carry is refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import RequestError
from dbench.options import EngineOptions
from dbench.serve import wire, wire_link
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.sequence import (
    BlockEnd,
    BlockKey,
    BlockOutcome,
    BlockStep,
    BlockTask,
    BlockTimes,
    Fault,
    SamplingParameters,
)

INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
IDS = st.lists(INT32, max_size=5).map(tuple)
TEXT = st.text(max_size=8)

SAMPLING = st.builds(
    SamplingParameters,
    unmasking_strategy=TEXT,
    temperature=FLOATS,
    confidence_threshold=st.none() | FLOATS,
    fixed_unmask_quota=st.none() | INT64,
    dynamic_unmask_factor=st.none() | FLOATS,
    entropy_threshold=st.none() | FLOATS,
    margin_threshold=st.none() | FLOATS,
)
SUBMISSIONS = st.builds(
    wire.Submission,
    prompt_token_ids=IDS,
    gen_length=INT32,
    sampling=SAMPLING,
    request_seed=st.none() | INT64,
    ignore_eos=st.booleans(),
)
POLL_STATES = st.builds(
    wire.PollState,
    status=TEXT,
    sequence=IDS,
    num_prompt_tokens=INT32,
    num_forward_passes=INT32,
    error_message=TEXT,
    arrival_s=FLOATS,
    first_refresh_s=st.none() | FLOATS,
    completion_s=st.none() | FLOATS,
    generated_token_ids=IDS,
)
REPLIES = st.builds(wire.Accepted, TEXT) | st.builds(wire.FinishedBlock, block_index=INT32, token_ids=IDS) | POLL_STATES
KEYS = st.builds(BlockKey, request_id=TEXT, block_index=INT32, attempt=INT32)
TASKS = st.builds(
    BlockTask,
    key=KEYS,
    token_ids=IDS,
    num_masks=INT32,
    block_length=INT32,
    sampling=SAMPLING,
    request_seed=INT64,
    ignore_eos=st.booleans(),
    arrival_s=FLOATS,
    num_remaining_blocks=INT32,
    alone=st.booleans(),
)
ENDS = st.builds(
    BlockEnd,
    key=KEYS,
    outcome=st.sampled_from(BlockOutcome),
    token_ids=IDS,
    found_eos=st.booleans(),
    error=TEXT,
    times=st.none() | st.builds(BlockTimes, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS),
    steps=st.lists(st.builds(BlockStep, end_s=FLOATS, num_unmasked=INT32), max_size=3).map(tuple),
    fault=st.sampled_from(Fault),
)
WORKER_MESSAGES = (
    st.builds(
        wire_link.Hello,
        worker_key=TEXT,
        worker_id=st.none() | INT32,
        device=TEXT,
        pid=INT32,
        version=TEXT,
        host=TEXT,
        instance=TEXT,
        kind=TEXT,
    )
    | st.builds(wire_link.Ready, pages_total=INT32, kv_page_size=INT32, max_model_len=INT32)
    | st.builds(
        wire_link.EngineProgress,
        now_s=FLOATS,
        iteration=INT32,
        refreshed=st.lists(KEYS, max_size=2).map(tuple),
        ended=st.lists(ENDS, max_size=2).map(tuple),
        event_lines=st.lists(TEXT, max_size=2).map(tuple),
        iteration_age_s=st.none() | FLOATS,
    )
    | st.builds(wire_link.Fatal, TEXT)
    | st.just(wire_link.Leaving())
)
COMMANDS = (
    st.builds(
        wire_link.Welcome,
        INT32,
        st.builds(EngineOptions, model=st.sampled_from(["embedded", "/srv/llada"]), kv_max_pages=st.integers(1, 100)),
        TEXT,
    )
    | st.builds(wire_link.RunBlock, TASKS)
    | st.builds(wire_link.CancelBlock, KEYS)
    | st.just(wire_link.Drain())
)
WORKERS = st.builds(
    wire.WorkerStatus,
    worker_id=INT32,
    kind=TEXT,
    device=TEXT,
    ready=st.booleans(),
    state=TEXT,
    pages_total=INT32,
    pages_used=INT32,
    kv_page_size=INT32,
    queue_depth_waiting=INT32,
    queue_depth_active=INT32,
    outstanding_prefill_tokens=INT32,
    num_iterations=INT64,
    num_forward_passes=INT64,
    num_unmasked_tokens=INT64,
    pid=INT32,
    num_losses=INT32,
)
STATUSES = st.builds(
    wire.ServerStatus,
    version=TEXT,
    ready_for_requests=st.booleans(),
    model=TEXT,
    block_length=INT32,
    max_gen_len=st.none() | INT32,
    max_model_len=INT32,
    vocabulary_size=INT32,
    reserved_token_ids=IDS,
    mask_token_id=INT32,
    eos_token_ids=IDS,
    workers=st.lists(WORKERS, max_size=2).map(tuple),
    resolved_config_json=TEXT,
    environment_json=TEXT,
    now_s=FLOATS,
    num_requests_in_server=INT32,
    tokenizer=TEXT,
    metrics_output_dir=TEXT,
    worker_counts=st.lists(st.builds(wire.WorkerCount, TEXT, INT32, INT32), max_size=2).map(tuple),
)


@given(SUBMISSIONS)
def test_a_submission_survives_the_wire(submission: wire.Submission) -> None:
    data = wire.submission_to_message(submission).SerializeToString()
    assert wire.submission_from_message(pb.GenerationRequest.FromString(data)) == submission


@given(REPLIES)
def test_a_reply_of_generate_survives_the_wire(reply: wire.GenerateReply) -> None:
    data = wire.generate_reply_to_message(reply).SerializeToString()
    assert wire.generate_reply_from_message(pb.GenerateReply.FromString(data)) == reply


@given(STATUSES)
def test_a_server_status_survives_the_wire(status: wire.ServerStatus) -> None:
    data = wire.server_status_to_message(status).SerializeToString()
    assert wire.server_status_from_message(pb.ServerStatusReply.FromString(data)) == status


@given(WORKER_MESSAGES)
def test_a_worker_message_survives_the_wire(record: wire_link.WorkerMessage) -> None:
    data = wire_link.worker_message_to_message(record).SerializeToString()
    assert wire_link.worker_message_from_message(pb.WorkerMessage.FromString(data)) == record


@given(COMMANDS)
def test_a_command_survives_the_wire(command: wire_link.Command) -> None:
    data = wire_link.command_to_message(command).SerializeToString()
    assert wire_link.command_from_message(pb.SchedulerCommand.FromString(data)) == command


def test_absent_sampling_parameters_are_the_defaults() -> None:
    message = pb.GenerationRequest(prompt_token_ids=[1], gen_length=4)
    assert wire.submission_from_message(message).sampling == SamplingParameters()


def test_a_seed_of_zero_is_a_seed() -> None:
    message = pb.GenerationRequest(prompt_token_ids=[1], gen_length=4, request_seed=0)
    assert wire.submission_from_message(message).request_seed == 0
    assert wire.submission_from_message(pb.GenerationRequest()).request_seed is None


@pytest.mark.parametrize(
    "submission",
    [
        wire.Submission((2**31,), 4),
        wire.Submission((1,), 2**31),
        wire.Submission((1,), 4, request_seed=2**63),
    ],
)
def test_a_number_too_large_for_the_wire_is_refused(submission: wire.Submission) -> None:
    with pytest.raises(RequestError, match="int32"):
        wire.submission_to_message(submission)


def test_options_that_this_version_does_not_know_are_refused() -> None:
    for engine_json in ('{"no_such_option": 1}', "no JSON"):
        with pytest.raises(ValueError, match="the welcome's options cannot be read"):
            wire_link.command_from_message(pb.SchedulerCommand(welcome=pb.Welcome(engine_json=engine_json)))


def test_empty_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="accepted_request_id, block or result"):
        wire.generate_reply_from_message(pb.GenerateReply())
    with pytest.raises(ValueError, match="hello, ready, progress, fatal or leaving"):
        wire_link.worker_message_from_message(pb.WorkerMessage())
    with pytest.raises(ValueError, match="welcome, run, reserve, send, cancel or drain"):
        wire_link.command_from_message(pb.SchedulerCommand())
