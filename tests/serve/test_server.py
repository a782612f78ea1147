"""The gRPC server with real streams and scripted workers, as clients and workers see it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dbench.errors import OptionError, QueueFullError, RequestError, ServerUnavailable
from dbench.event_file import read_events
from dbench.events import BlockRouted, RequestFinished, WorkerUp
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.endpoint import check_address
from dbench.serve.recorder import Recorder
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import NOT_FOUND, Accepted, FinishedBlock, GenerateReply, PollState, Submission, bearer
from tests.serve.server_builders import (
    DEADLINE_S,
    Gate,
    ServerInThisProcess,
    events_of,
    eventually,
    final_state,
    run,
)

PROMPT = (1, 2, 3)


async def replies_of(client: Client, submission: Submission) -> list[GenerateReply]:
    async with aclosing(client.generate(submission)) as replies:
        return [reply async for reply in replies]


def test_generate_gives_the_id_then_the_blocks_then_the_result() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open()
            accepted, *blocks, result = await replies_of(client, Submission(PROMPT, 12))
            assert isinstance(accepted, Accepted)
            assert accepted.request_id
            assert isinstance(result, PollState)
            assert [b.block_index for b in blocks if isinstance(b, FinishedBlock)] == [0, 1, 2]
            ids = sum((b.token_ids for b in blocks if isinstance(b, FinishedBlock)), ())
            assert (result.status, result.generated_token_ids) == ("COMPLETED", ids)
            assert result.sequence == PROMPT + ids
            assert result.num_forward_passes == 12

    run(scenario())


def test_submit_returns_at_once_and_poll_follows() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open(gate.script)
            request_id = await client.submit(Submission(PROMPT, 8))
            state = await client.poll(request_id)
            assert state.status in ("PREFILLING", "DECODING")
            assert state.sequence == PROMPT + (server.deployment.mask_token_id,) * 8
            gate.open()
            state = await final_state(client, request_id)
            assert state.status == "COMPLETED"
            assert len(state.generated_token_ids) == 8
            assert state.completion_s is not None
            assert state.first_refresh_s is not None
            assert state.arrival_s <= state.completion_s
            assert (await client.poll("nobody")).status == NOT_FOUND

    run(scenario())


def test_requests_sent_before_workers_are_ready_wait_as_pending() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            request_id = await client.submit(Submission(PROMPT, 4))
            assert (await client.poll(request_id)).status == "PENDING"
            assert not (await client.status()).ready_for_requests
            await server.open()
            assert (await final_state(client, request_id)).status == "COMPLETED"
            assert (await client.wait_until_ready(DEADLINE_S)).ready_for_requests

    run(scenario())


def test_the_same_request_gives_the_same_tokens_on_either_worker() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(prefill_scheduler_policy="round_robin") as server, server.client() as client:
            await server.open()
            results = [await submit_and_wait(client, Submission(PROMPT, 4)) for _ in range(2)]
            routed = [event.worker_id for event in await events_of(client) if isinstance(event, BlockRouted)]
            assert routed == [0, 1]
            assert results[0].token_ids == results[1].token_ids

    run(scenario())


def test_cancel_ends_a_running_request() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open(gate.script)
            request_id = await client.submit(Submission(PROMPT, 8))
            assert await client.cancel(request_id) == "CANCELLED"
            assert (await client.poll(request_id)).error_message == "cancelled by the client"
            gate.open()
            await server.hub.until(lambda: all(w.outstanding_prefill_tokens == 0 for w in server.hub.worker_statuses()))

    run(scenario())


def test_a_client_that_goes_away_cancels() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open(gate.script)
            async with server.client() as leaving:
                replies = leaving.generate(Submission(PROMPT, 8))
                accepted = await anext(replies)
                assert isinstance(accepted, Accepted)
            state = await final_state(client, accepted.request_id)
            assert state.status == "CANCELLED"
            gate.open()
            await replies.aclose()

    run(scenario())


def test_leaving_the_iteration_cancels() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open(gate.script)
            async with aclosing(client.generate(Submission(PROMPT, 8))) as replies:
                accepted = await anext(replies)
                assert isinstance(accepted, Accepted)
            assert (await final_state(client, accepted.request_id)).status == "CANCELLED"
            gate.open()

    run(scenario())


def test_a_deadline_cancels() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open(gate.script)
            replies = client.generate(Submission(PROMPT, 8), timeout_s=0.5)
            accepted = await anext(replies)
            assert isinstance(accepted, Accepted)
            with pytest.raises(ServerUnavailable, match="did not answer in time"):
                await anext(replies)
            assert (await final_state(client, accepted.request_id)).status == "CANCELLED"
            gate.open()

    run(scenario())


def test_a_refused_request_says_why() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            with pytest.raises(RequestError, match=r"gen_length 5 is no positive multiple .* block_length 4"):
                await client.submit(Submission(PROMPT, 5))
            foreign = Submission(PROMPT, 4, SamplingParameters(fixed_unmask_quota=2))
            with pytest.raises(RequestError, match="fixed_unmask_quota 2 does not belong to conf_threshold"):
                await replies_of(client, foreign)

    run(scenario())


def test_a_message_that_is_too_large_is_refused_as_a_request() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            with pytest.raises(RequestError, match="larger than max"):
                await client.submit(Submission((2**31 - 1,) * 4_000_000, 4))

    run(scenario())


def test_a_full_server_says_so() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(max_queued_requests=1) as server, server.client() as client:
            await client.submit(Submission(PROMPT, 4))
            with pytest.raises(QueueFullError, match="holds 1 requests"):
                await client.submit(Submission(PROMPT, 4))

    run(scenario())


def test_a_draining_server_takes_nothing_new() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open()
            server.hub.is_draining = True
            with pytest.raises(ServerUnavailable, match="draining"):
                await client.submit(Submission(PROMPT, 4))
            assert not (await client.status()).ready_for_requests

    run(scenario())


def test_nobody_at_the_address_is_said_with_the_address() -> None:
    async def scenario() -> None:
        async with Client("127.0.0.1:1") as client:
            with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1 is not available.*dbench serve"):
                await client.status()

    run(scenario())


def test_calls_need_the_api_key_where_there_is_one() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(api_key="sesame") as server:
            for wrong in (None, "simsim"):
                async with server.client(wrong) as client:
                    with pytest.raises(OptionError, match="api_key"):
                        await client.status()
                    with pytest.raises(OptionError, match="api_key"):
                        await replies_of(client, Submission(PROMPT, 4))
            async with server.client("sesame") as client:
                await server.open()
                assert (await submit_and_wait(client, Submission(PROMPT, 4))).status == "COMPLETED"

    run(scenario())


@pytest.mark.parametrize("key", ["", "sésame", " sesame", "two\nlines"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    async def scenario() -> None:
        with pytest.raises(OptionError, match="api_key: holds characters"):
            await Client("127.0.0.1:1", key).__aenter__()
        with pytest.raises(OptionError, match="api_key: holds characters"):
            bearer(key)

    run(scenario())


def test_health_and_reflection_answer_without_a_key() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(api_key="sesame") as server:
            channel = grpc.aio.insecure_channel(server.endpoint.address)
            health = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse
            for name in ("", "dbench.v1.Dbench"):
                request = health_pb2.HealthCheckRequest(service=name)
                assert (await health.Check(request)).status == serving.NOT_SERVING
            await server.open()
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving.SERVING
            assert {"dbench.v1.Dbench", "dbench.v1.WorkerLink", "grpc.health.v1.Health"} <= await services(channel)
            await channel.close()

    run(scenario())


async def services(channel: grpc.aio.Channel) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for response in call:
        return {service.name for service in response.list_services_response.service}
    return set()


def test_status_describes_the_server_and_its_workers() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(max_gen_len=16) as server, server.client() as client:
            await server.open()
            status = await client.status()
            assert status.ready_for_requests
            assert (status.model, status.block_length, status.max_gen_len, status.max_model_len) == (
                "embedded",
                4,
                16,
                256,
            )
            assert status.mask_token_id in status.reserved_token_ids
            assert status.vocabulary_size == server.deployment.model.vocab_size
            assert (status.resolved_config_json, status.environment_json) == (server.config_json, '{"machine":"test"}')
            assert [(w.worker_id, w.kind, w.pages_total, w.state) for w in status.workers] == [
                (0, "colocated", 128, "idle"),
                (1, "colocated", 128, "idle"),
            ]

    run(scenario())


def test_a_mask_id_of_ones_own_is_reserved_too() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(mask_id=7) as server, server.client() as client:
            status = await client.status()
            assert status.mask_token_id == 7
            assert status.reserved_token_ids == tuple(sorted({7, *server.deployment.model.reserved_token_ids}))

    run(scenario())


def test_metrics_start_anew_at_a_reset_with_how_things_stand() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open()
            await submit_and_wait(client, Submission(PROMPT, 4))
            reset_s = await client.reset_metrics()
            result = await submit_and_wait(client, Submission(PROMPT, 8))
            events = await events_of(client)
            assert {e.worker_id for e in events if isinstance(e, WorkerUp)} == {0, 1}
            finished = [e for e in events if isinstance(e, RequestFinished)]
            assert [(e.request_id, e.num_gen_tokens) for e in finished] == [(result.request_id, 8)]
            assert min(e.at_s for e in events) >= reset_s - 1.0

    run(scenario())


def test_events_are_appended_to_the_metrics_folder(tmp_path: Path) -> None:
    async def scenario() -> str:
        async with ServerInThisProcess(recorder=Recorder(tmp_path / "new")) as server, server.client() as client:
            await server.open()
            await client.reset_metrics()
            return (await submit_and_wait(client, Submission(PROMPT, 4))).request_id

    request_id = run(scenario())
    with (tmp_path / "new" / "events.jsonl").open() as lines:
        events = list(read_events(lines))
    assert [e.request_id for e in events if isinstance(e, RequestFinished)] == [request_id]
    assert {e.worker_id for e in events if isinstance(e, WorkerUp)} == {0, 1}


def test_many_requests_at_once_all_come_back() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open()
            wants = [Submission((1,) * (1 + i % 30), 4 * (1 + i % 5), request_seed=i) for i in range(60)]
            results = await asyncio.gather(*(submit_and_wait(client, want) for want in wants))
            assert [r.status for r in results] == ["COMPLETED"] * 60
            assert [len(r.token_ids) for r in results] == [want.gen_length for want in wants]

            async def all_pages_are_back() -> bool:
                return all(worker.pages_used == 0 for worker in (await client.status()).workers)

            await eventually(all_pages_are_back)

    run(scenario())


def test_blocks_reach_submit_and_wait_as_they_come() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            await server.open()
            blocks: list[FinishedBlock] = []
            result = await submit_and_wait(client, Submission(PROMPT, 8), blocks.append)
            assert result.token_ids == blocks[0].token_ids + blocks[1].token_ids
            assert result.time_to_first_block_s is not None
            assert result.time_to_first_block_s <= result.latency_s

    run(scenario())


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server:
            port = int(server.endpoint.address.rpartition(":")[2])
            service = replace(server.service, scheduler_port=port)
            with pytest.raises(OptionError, match=f"scheduler_port: got {port}, which is in use on 127.0.0.1"):
                check_address(service)

    run(scenario())
