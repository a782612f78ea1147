"""Streams of workers come and go; only the current one of a worker counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from dbench.events import BatchExecuted, event_to_json
from dbench.serve.hub import Hub
from dbench.serve.link_service import WorkerLinkService
from dbench.serve.proto import dbench_pb2 as pb
from dbench.serve.wire_link import EngineProgress, Hello, Ready, worker_message_to_message
from tests.serve.server_builders import WORKER_KEY, ServerInThisProcess, run

HELLO = Hello(WORKER_KEY, 0, "cpu", 1)
READY = Ready(8, 16, 128)
BATCH = BatchExecuted(2.0, "worker-0", 0, 1.0, 1, 4, 0, 0, 1, None, 0.1)


@pytest.fixture
def hub() -> Hub:
    hub = ServerInThisProcess(gpus="cpu").hub
    hub.await_lost_workers(is_on=True)
    return hub


def state(hub: Hub) -> str:
    return hub.worker_statuses()[0].state


def test_the_end_of_an_old_stream_is_no_loss_of_the_worker_that_came_back(hub: Hub) -> None:
    old = hub.connect(0)
    hub.worker_ready(HELLO, READY)
    hub.worker_gone(0, "its process ended")
    hub.worker_starts(0)
    hub.connect(0)
    hub.worker_ready(HELLO, READY)
    hub.link_ended(0, old, "its stream ended")
    assert state(hub) == "idle"


def test_a_worker_that_is_lost_gets_no_more_commands(hub: Hub) -> None:
    link = hub.connect(0)
    hub.worker_ready(HELLO, READY)
    hub.worker_gone(0, "it hangs")
    assert link.closed.is_set()
    assert link.commands.get_nowait() is None
    assert not hub.is_expected(0)
    hub.worker_starts(0)
    assert hub.is_expected(0)


def test_what_a_worker_said_before_its_last_start_is_no_reason_any_more(hub: Hub) -> None:
    hub.connect(0)
    hub.fatal_errors[0] = "out of memory"
    hub.worker_gone(0, "its stream ended")
    assert hub.recent_errors[-1] == "worker 0 was lost: out of memory"
    hub.worker_starts(0)
    hub.worker_gone(0, "its process ended")
    assert hub.recent_errors[-1] == "worker 0 was lost: its process ended"


class Context:
    """As much of gRPC's as a worker's stream needs."""

    async def write(self, message: pb.SchedulerCommand) -> None:
        return


def test_messages_of_a_worker_that_was_lost_meanwhile_are_dropped() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server:

            async def messages() -> AsyncIterator[pb.WorkerMessage]:
                batch = EngineProgress(0.0, 1, event_lines=(event_to_json(BATCH),))
                for message in (HELLO, READY, batch):
                    yield worker_message_to_message(message)
                server.hub.worker_gone(0, "it hangs")
                yield worker_message_to_message(batch)

            service = WorkerLinkService(server.hub, server.terms)
            await service.Connect(messages(), cast(Any, Context()))
            lines = [line for part in server.hub.export() for line in part.lines]
            assert sum("batch_executed" in line for line in lines) == 1
            assert state(server.hub) == "lost"

    run(scenario())
