"""Workers of other hosts over real streams: who is taken in, who comes back, and how one leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dbench.events import BlockFinished, WorkerLeft, WorkerLost
from dbench.serve.link_service import WorkerTerms
from dbench.serve.sequence import BlockTask
from dbench.serve.wire import Submission
from dbench.serve.wire_link import Hello, Ready, SendBlock, Welcome
from dbench.serve.worker_stream import StreamEnded, WorkerStream
from tests.serve.server_builders import (
    DEADLINE_S,
    WORKER_KEY,
    Gate,
    ServerInThisProcess,
    events_of,
    final_state,
    run,
)

PROMPT = (1, 2, 3)
STRANGER = Hello(WORKER_KEY, None, "cpu", 1, host="elsewhere", instance="a")


def server_with(**given: object) -> ServerInThisProcess:
    options: dict[str, Any] = {"gpus": "cpu", "worker_key": WORKER_KEY, **given}
    return ServerInThisProcess(**options)


async def first_answer(address: str, hello: Hello) -> Welcome | StreamEnded:
    stream = WorkerStream(address, hello)
    stream.start()
    (answer, *_) = await asyncio.to_thread(stream.wait_for_commands)
    await asyncio.to_thread(stream.close)
    assert isinstance(answer, Welcome | StreamEnded)
    return answer


def test_a_worker_of_another_host_is_told_everything_and_works() -> None:
    async def scenario() -> None:
        async with server_with(gpus="none", num_remote_workers=1) as server, server.client() as client:
            request_id = await client.submit(Submission(PROMPT, 8))
            assert (await client.poll(request_id)).status == "PENDING"
            answer = await first_answer(server.endpoint.local_address, STRANGER)
            assert answer == Welcome(0, server.deployment.options, server.deployment.model_fingerprint())
            server.join("a")
            assert (await final_state(client, request_id)).status == "COMPLETED"
            (worker,) = (await client.status()).workers
            assert (worker.device, worker.ready) == ("cpu on elsewhere", True)

    run(scenario())


class Failing:
    """What is told of commands, and cannot bear it."""

    def block_arrived(self, task: BlockTask) -> None:
        raise RuntimeError("can't start new thread")

    def send_block(self, command: SendBlock) -> None:
        raise NotImplementedError


def test_whatever_fails_in_the_reader_of_a_stream_ends_it() -> None:
    async def scenario() -> None:
        async with server_with(gpus="none", num_remote_workers=1) as server, server.client() as client:
            stream = WorkerStream(server.endpoint.local_address, STRANGER)
            stream.listen(Failing())
            stream.start()
            await asyncio.to_thread(stream.wait_for_commands)
            stream.send(Ready(100, 16, 4096))
            await server.has_states("idle")
            await client.submit(Submission(PROMPT, 8))
            (ended,) = await asyncio.to_thread(stream.wait_for_commands)
            await asyncio.to_thread(stream.close)
            assert ended == StreamEnded("its reader has failed: RuntimeError: can't start new thread")

    run(scenario())


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (replace(STRANGER, worker_key="guess"), "wrong worker key"),
        (replace(STRANGER, version="0.0.1"), "the worker is dbench 0.0.1, the server"),
    ],
)
def test_a_worker_with_a_wrong_key_or_version_is_refused_for_good(hello: Hello, reason: str) -> None:
    async def scenario() -> None:
        async with server_with() as server:
            answer = await first_answer(server.endpoint.local_address, hello)
            assert isinstance(answer, StreamEnded)
            assert answer.is_refusal
            assert reason in answer.reason
            assert len(server.hub.worker_statuses()) == 1

    run(scenario())


def test_a_hybrid_server_takes_only_workers_that_can_exchange_kv_with_its_own() -> None:
    async def scenario() -> None:
        hybrid = {"mode": "hybrid", "gpus": None, "prefill_gpus": "cpu", "hybrid_colocated_gpus": "cpu"}
        async with server_with(**hybrid) as server:
            answer = await first_answer(server.endpoint.local_address, replace(STRANGER, device="cuda:0"))
            assert isinstance(answer, StreamEnded)
            assert answer.is_refusal
            assert "got cuda:0, worker 0 has cpu" in answer.reason
            assert isinstance(await first_answer(server.endpoint.local_address, STRANGER), Welcome)
        async with server_with() as server:
            answer = await first_answer(server.endpoint.local_address, replace(STRANGER, device="cuda:0"))
            assert isinstance(answer, Welcome)

    run(scenario())


def test_remote_workers_of_a_hybrid_server_have_devices_of_one_sort_among_themselves() -> None:
    async def scenario() -> None:
        hybrid = {"mode": "hybrid", "gpus": None, "num_remote_workers": 1, "num_remote_prefill_workers": 1}
        async with server_with(**hybrid) as server:
            server.hub.join(replace(STRANGER, device="cuda:3", kind="prefill"))
            answer = await first_answer(server.endpoint.local_address, replace(STRANGER, instance="b"))
            assert isinstance(answer, StreamEnded)
            assert "got cpu, worker 0 has cuda:3 on elsewhere" in answer.reason
            server.hub.worker_gone(0, "it has gone")
            answer = await first_answer(server.endpoint.local_address, replace(STRANGER, instance="b"))
            assert isinstance(answer, Welcome)

    run(scenario())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "prefill",
            "this server is in colocated mode and takes no prefill worker; start the worker with --worker-type",
        ),
        ("idler", "the kind of a worker: got 'idler', wanted one of colocated, prefill"),
    ],
)
def test_a_worker_of_a_kind_that_the_server_has_no_work_for_is_refused(kind: str, reason: str) -> None:
    async def scenario() -> None:
        async with server_with() as server:
            answer = await first_answer(server.endpoint.local_address, replace(STRANGER, kind=kind))
            assert isinstance(answer, StreamEnded)
            assert answer.is_refusal
            assert reason in answer.reason

    run(scenario())


def test_a_prefill_worker_is_welcome_as_one() -> None:
    async def scenario() -> None:
        hybrid = {"mode": "hybrid", "gpus": None, "prefill_gpus": "cpu", "hybrid_colocated_gpus": "cpu"}
        async with server_with(**hybrid) as server:
            answer = await first_answer(server.endpoint.local_address, replace(STRANGER, kind="prefill"))
            assert isinstance(answer, Welcome)
            assert (answer.worker_id, answer.kind) == (2, "prefill")

    run(scenario())


def test_a_server_without_a_worker_key_takes_nobody_from_elsewhere() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server:
            answer = await first_answer(server.endpoint.local_address, STRANGER)
            assert isinstance(answer, StreamEnded)
            assert answer.is_refusal
            assert "start it with --worker-key" in answer.reason

    run(scenario())


def test_a_server_that_drains_takes_nobody_but_may_later() -> None:
    async def scenario() -> None:
        async with server_with() as server:
            server.hub.is_draining = True
            answer = await first_answer(server.endpoint.local_address, STRANGER)
            assert isinstance(answer, StreamEnded)
            assert not answer.is_refusal

    run(scenario())


def test_the_key_is_in_no_text_of_a_record() -> None:
    terms = WorkerTerms(WORKER_KEY, True, server_with().deployment.options, "")
    assert WORKER_KEY not in repr(terms) + repr(STRANGER)


def test_a_worker_that_dials_again_before_its_old_stream_has_ended_keeps_its_number() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with server_with(gpus="none", num_remote_workers=1) as server, server.client() as client:
            old = server.join("a", gate.script)
            await server.has_states("idle")
            request_id = await client.submit(Submission(PROMPT, 8))
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            server.join("a")
            assert (await final_state(client, request_id)).status == "COMPLETED"
            gate.open()
            await asyncio.to_thread(old.thread.join, DEADLINE_S)
            events = await events_of(client)
            assert [e.reason for e in events if isinstance(e, WorkerLost)] == ["it has dialled again"]
            assert [(e.attempt, e.outcome) for e in events if isinstance(e, BlockFinished)] == [
                (0, "failed"),
                (1, "done"),
                (0, "done"),
            ]

    run(scenario())


def test_a_leaving_worker_ends_the_block_that_it_runs_and_hands_back_what_waits() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with (
            server_with(gpus="none", num_remote_workers=1, max_batch_size=1, max_block_retries=0) as server,
            server.client() as client,
        ):
            leaver = server.join("a", gate.script)
            await server.has_states("idle")
            ids = [await client.submit(Submission((1 + i, 2), 4)) for i in range(3)]
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            leaver.stream.ask_to_leave()
            await leaver.has_been_sent(3)  # two blocks and the drain
            gate.open()
            await asyncio.to_thread(leaver.thread.join, DEADLINE_S)
            assert leaver.error is None
            await server.has_states("awaited")
            assert (await client.poll(ids[0])).status == "COMPLETED"
            assert {(await client.poll(request_id)).status for request_id in ids[1:]} == {"PENDING"}
            server.join("b")
            assert [(await final_state(client, request_id)).status for request_id in ids] == ["COMPLETED"] * 3
            events = await events_of(client)
            assert [e.worker_id for e in events if isinstance(e, WorkerLeft | WorkerLost)] == [0]

    run(scenario())


def test_a_leaving_worker_hands_back_what_has_not_ended_after_the_drain_timeout() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with server_with(max_block_retries=0) as server, server.client() as client:
            leaver = server.join("a", gate.script)
            leaver.drain_timeout_s = 0.0
            await server.has_states("starting", "idle")
            request_id = await client.submit(Submission(PROMPT, 128))
            await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
            leaver.stream.ask_to_leave()
            await leaver.has_been_sent(1)
            gate.open()
            await server.has_states("starting", "ended")
            state = await client.poll(request_id)
            assert state.status in ("PENDING", "WAITING_NEXT_BLOCK")
            server.add_worker(0)
            assert (await final_state(client, request_id)).status == "COMPLETED"

    run(scenario())
