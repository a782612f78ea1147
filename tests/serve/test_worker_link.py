"""Workers over real streams: who is taken in, and what becomes of the blocks of one that goes."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest

from dbench.errors import ServerUnavailable
from dbench.events import BlockFinished, BlockRouted
from dbench.serve.fake_runner import FakeScript
from dbench.serve.wire import Submission
from dbench.serve.wire_link import EngineProgress, Hello, WorkerMessage, worker_message_to_message
from dbench.serve.worker_stream import StreamEnded, WorkerStream
from tests.serve.server_builders import (
    DEADLINE_S,
    WORKER_KEY,
    Gate,
    ServerInThisProcess,
    ThreadWorker,
    events_of,
    eventually,
    final_state,
    run,
)

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


def test_a_block_with_bad_logits_ends_its_request_at_once() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            request_id = await client.submit(Submission(PROMPT, 8))
            await server.open(FakeScript(non_finite=frozenset({(request_id, 1, 2)})))
            state = await final_state(client, request_id)
            assert (state.status, state.error_message) == ("ERROR", "block 1, step 2: non-finite logits (scripted)")
            assert [event.attempt for event in await events_of(client) if isinstance(event, BlockRouted)] == [0, 0]

    run(scenario())


def test_a_canvas_that_no_page_pool_can_hold_ends_its_request_at_once() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server, server.client() as client:
            small = ThreadWorker(server, 0, FakeScript())
            small.num_pages = 2
            server.workers.append(small.start())
            state = await final_state(client, await client.submit(Submission((1,) * 40, 4)))
            assert state.status == "ERROR"
            assert "a canvas of 44 tokens needs 3 KV pages, the worker has 2 of 16 tokens" in state.error_message
            assert len([e for e in await events_of(client) if isinstance(e, BlockRouted)]) == 1

    run(scenario())


def test_a_poisonous_request_ends_alone_and_its_neighbours_complete() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(max_block_retries=0) as server, server.client() as client:
            ids = [await client.submit(Submission((1 + i, 2, 3), 8)) for i in range(8)]
            await server.open(FakeScript(poisonous=frozenset({ids[3]})))
            states = [await final_state(client, request_id) for request_id in ids]
            assert [state.status for state in states] == ["COMPLETED"] * 3 + ["ERROR"] + ["COMPLETED"] * 4
            assert states[3].error_message.startswith("block 0 failed once, last on worker")

    run(scenario())


def test_a_block_that_comes_while_a_batch_runs_was_received_then() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with ServerInThisProcess(gpus="cpu") as server, server.client() as client:
            await server.open(gate.script)
            await client.submit(Submission(PROMPT, 4))
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            late_id = await client.submit(Submission(PROMPT, 4))
            await server.workers[0].has_been_sent(1)
            seen_s = time.monotonic()
            await asyncio.sleep(0.05)
            waited_s = time.monotonic() - seen_s
            gate.open()
            await final_state(client, late_id)
            ends = [event for event in await events_of(client) if isinstance(event, BlockFinished)]
            (late,) = [end for end in ends if end.request_id == late_id]
            assert late.received_s is not None
            assert late.refresh_start_s is not None
            assert late.refresh_start_s - late.received_s >= waited_s

    run(scenario())


def test_a_worker_that_hangs_is_lost_and_what_it_says_late_harms_nothing() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with (
            ServerInThisProcess(worker_timeout_s=2.0, prefill_scheduler_policy="round_robin") as server,
            server.client() as client,
        ):
            hanging = server.add_worker(0, gate.script)
            await server.hub.until(lambda: server.hub.worker_statuses()[0].ready)
            request_id = await client.submit(Submission(PROMPT, 4))
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            server.add_worker(1)

            async def is_lost() -> bool:
                server.hub.lose_hanging_workers()
                return server.hub.worker_statuses()[0].state == "lost"

            await eventually(is_lost)
            assert "its iteration 1 has run for" in server.hub.recent_errors[-1]
            state = await final_state(client, request_id)
            assert state.status == "COMPLETED"
            gate.open()
            await asyncio.to_thread(hanging.thread.join, DEADLINE_S)
            assert isinstance(hanging.error, ServerUnavailable)
            assert await client.poll(request_id) == state
            ends = [(e.worker_id, e.outcome) for e in await events_of(client) if isinstance(e, BlockFinished)]
            assert ends == [(0, "failed"), (1, "done")]

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
            await server.hub.until(lambda: all(w.state == "ended" for w in server.hub.worker_statuses()))
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
