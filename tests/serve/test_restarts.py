"""When a lost worker is started again, and when no more."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from dbench.serve.child import LogLine, read_log_line
from dbench.serve.handover import WorkerConfig
from dbench.serve.local_workers import LocalWorkers
from dbench.serve.restarts import BackOff, Restarts
from dbench.serve.wire import Submission
from tests.serve.server_builders import WORKER_KEY, ServerInThisProcess, final_state, run


def config_of(server: ServerInThisProcess, **changes: str) -> WorkerConfig:
    given = {"scheduler": server.endpoint.local_address, "worker_key": WORKER_KEY, **changes}
    return WorkerConfig(given["scheduler"], given["worker_key"], 0, "cpu", 1, logging.INFO, "127.0.0.1", 0)


def test_pauses_double_up_to_the_longest() -> None:
    back_off = BackOff()
    assert [back_off.pause_s(5.0) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_worker_that_was_steady_begins_anew() -> None:
    back_off = BackOff()
    assert [back_off.pause_s(ready_for_s) for ready_for_s in (5.0, 5.0, 59.0, 60.0, 5.0)] == [1, 2, 4, 1, 2]


def test_after_five_starts_in_a_row_that_failed_it_is_enough() -> None:
    back_off = BackOff()
    assert [back_off.pause_s(None) for _ in range(5)] == [1, 2, 4, 8, None]


def test_a_start_that_succeeds_forgives_those_that_failed() -> None:
    back_off = BackOff()
    ready_for_s = (None, None, None, None, 5.0, None, None, None, None)
    assert [back_off.pause_s(one) for one in ready_for_s] == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert back_off.pause_s(None) is None


def test_a_worker_that_can_no_longer_be_started_ends_the_requests_that_waited_with_its_reason() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server, server.client() as client:
            local = LocalWorkers([config_of(server, worker_key="another key")], server.hub.worker_gone)
            restarts = Restarts(server.hub, local, 60.0, partial(BackOff, first_s=0.01))
            restarts.start()
            await local.start()
            state = await final_state(client, await client.submit(Submission((1, 2, 3), 4)))
            assert state.status == "ERROR"
            reason = "could not be started again 5 times in a row: the worker was not taken in: wrong worker key"
            assert reason in state.error_message
            assert [worker.state for worker in server.hub.worker_statuses()] == ["lost"]
            await restarts.stop()
            await local.end()

    run(scenario())


def test_a_stop_ends_the_pause_before_a_start() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server:
            local = LocalWorkers([config_of(server, worker_key="another key")], server.hub.worker_gone)
            restarts = Restarts(server.hub, local, 60.0, partial(BackOff, first_s=1e6, longest_s=1e6))
            task = restarts.start()
            await local.start()
            await server.hub.until_news(lambda: server.hub.is_awaited(0))
            await restarts.stop()
            assert task.done()
            await local.end()

    run(scenario())


def test_a_worker_that_does_not_become_ready_in_time_is_killed() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server:
            local = LocalWorkers([config_of(server)], server.hub.worker_gone)
            restarts = Restarts(server.hub, local, 0.01, partial(BackOff, first_s=0.01, max_failed_starts=3))
            restarts.start()
            await local.start()
            local.kill()
            await server.hub.until_news(lambda: server.hub.worker_statuses()[0].state == "lost")
            assert "it was not ready within startup_timeout_s 0.01" in "".join(server.hub.recent_errors)
            await restarts.stop()
            await asyncio.wait_for(local.wait(0.0), 1.0)
            assert not local._running()

    run(scenario())


def test_the_last_line_of_a_worker_is_its_message_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server:
            local = LocalWorkers([config_of(server, worker_key="another key")], server.hub.worker_gone)
            await local.start()
            worker = await local.first_ended()
            assert worker.last_line.startswith("the worker was not taken in: wrong worker key")

    run(scenario())
    lines = [record for record in caplog.records if "was not taken in" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.ERROR]
    assert lines[0].getMessage().startswith("worker 0: the worker was not taken in")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("2026-01-31 23:59:59,123 ERROR __main__: what: it was", LogLine(logging.ERROR, "what: it was")),
        ("2026-01-31 23:59:59,123 INFO dbench.serve.worker: ", LogLine(logging.INFO, "")),
        ("ValueError: 2026", LogLine(None, "ValueError: 2026")),
        ("", LogLine(None, "")),
    ],
)
def test_a_log_line_is_read_back(line: str, wanted: LogLine) -> None:
    assert read_log_line(line) == wanted
