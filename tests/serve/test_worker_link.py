"""Workers over real streams: who is taken in, and what becomes of the blocks of one that goes."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from dbench.errors import ServerUnavailable
from dbench.serve.fake_runner import FakeScript
from dbench.serve.wire import Submission
from dbench.serve.wire_link import EngineProgress, Hello, WorkerMessage, worker_message_to_message
from dbench.serve.worker_stream import StreamEnded, WorkerStream
from tests.serve.server_builders import DEADLINE_S, WORKER_KEY, Gate, ServerInThisProcess, final_state, run

PROMPT = (1, 2, 3)


def test_the_blocks_of_a_vanished_worker_finish_on_the_other() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess(prefill_scheduler_policy="round_robin") as server, server.client() as client:
            lost = server.add_worker(0, gate.script)
            await server.hub.until(lambda: server.hub.worker_statuses()[0].ready)
            request_id = await client.submit(Submission(PROMPT, 8))
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            server.add_worker(1)
            await server.hub.until(lambda: server.hub.worker_statuses()[1].ready)
            await asyncio.to_thread(lost.vanish)
            state = await final_state(client, request_id)
            assert state.status == "COMPLETED"
            assert [worker.state for worker in (await client.status()).workers] == ["lost", "idle"]
            gate.open()

    run(scenario())


def test_without_a_worker_requests_end_as_error() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess(gpus="cpu") as server, server.client() as client:
            await server.open(gate.script)
            request_id = await client.submit(Submission(PROMPT, 8))
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            await asyncio.to_thread(server.workers[0].vanish)
            state = await final_state(client, request_id)
            assert state.status == "ERROR"
            assert "no worker is left" in state.error_message
            with pytest.raises(ServerUnavailable, match="no worker is left"):
                await client.submit(Submission(PROMPT, 4))
            gate.open()

    run(scenario())


def test_a_block_with_bad_logits_is_tried_elsewhere_and_then_ends_its_request() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(max_block_retries=1) as server, server.client() as client:
            request_id = await client.submit(Submission(PROMPT, 8))
            await server.open(FakeScript(non_finite=frozenset({(request_id, 1, 2)})))
            state = await final_state(client, request_id)
            assert state.status == "ERROR"
            assert state.error_message.startswith("block 1 failed 2 times")
            assert "non-finite" in state.error_message

    run(scenario())


def test_a_worker_with_a_wrong_key_or_number_is_refused() -> None:
    async def refusal(address: str, hello: Hello) -> str:
        stream = WorkerStream(address, hello)
        stream.start()
        (ended,) = await asyncio.to_thread(stream.wait_for_commands)
        await asyncio.to_thread(stream.close)
        assert isinstance(ended, StreamEnded)
        return ended.reason

    async def scenario() -> None:
        async with ServerInThisProcess() as server:
            address = server.endpoint.local_address
            assert "wrong worker key" in await refusal(address, Hello("guess", 0, "cpu", 1))
            assert "worker 7 is not expected" in await refusal(address, Hello(WORKER_KEY, 7, "cpu", 1))
            await server.open()
            assert "worker 0 is not expected" in await refusal(address, Hello(WORKER_KEY, 0, "cpu", 1))

    run(scenario())


@pytest.mark.parametrize(
    "nonsense", [EngineProgress(0.0, 0, event_lines=("{}",)), Hello(WORKER_KEY, 0, "cpu", 1)], ids=["event", "hello"]
)
def test_a_worker_that_talks_nonsense_is_lost(nonsense: WorkerMessage) -> None:
    async def scenario() -> None:
        async with (
            ServerInThisProcess() as server,
            grpc.aio.insecure_channel(server.endpoint.local_address) as channel,
        ):
            connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                "/dbench.v1.WorkerLink/Connect"
            )
            messages = (Hello(WORKER_KEY, 0, "cpu", 1), nonsense)
            call = connect(iter([worker_message_to_message(m).SerializeToString() for m in messages]))
            async for _ in call:
                pass
            assert "makes no sense" in server.hub.recent_errors[-1]
            assert server.hub.worker_statuses()[0].state == "lost"

    run(scenario())


def test_workers_end_when_they_are_drained() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server:
            await server.open()
            server.hub.drain_workers()
            await server.hub.until(server.hub.all_workers_ended)
            for worker in server.workers:
                await asyncio.to_thread(worker.thread.join, DEADLINE_S)
                assert worker.error is None

    run(scenario())


def test_threads_of_the_streams_end_with_them() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server:
            await server.open()

    run(scenario())
    assert not [t.name for t in threading.enumerate() if t.name == "stream-reader"]
