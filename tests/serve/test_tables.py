"""Tables follow exports, one writer at a time, and a writer that fails harms nobody."""

from __future__ import annotations

import asyncio

import pytest

from dbench.errors import RunError
from dbench.serve.tables import TableWriter
from tests.serve.server_builders import ServerInThisProcess, events_of, eventually, run


class Writer:
    """Counts its calls; waits until it may go on."""

    def __init__(self, error: str = "") -> None:
        self.num_calls = 0
        self.may_end = asyncio.Event()
        self._error = error

    async def __call__(self) -> None:
        self.num_calls += 1
        await self.may_end.wait()
        if self._error:
            raise RunError(self._error)


def test_exports_during_a_writing_share_the_next_one() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            writer = Writer()
            tables = TableWriter(server.hub, writer)
            task = asyncio.create_task(tables.run())
            await events_of(client)

            async def has_begun() -> bool:
                return writer.num_calls == 1

            await eventually(has_begun)
            await events_of(client)
            await events_of(client)
            assert writer.num_calls == 1
            assert not tables.is_done
            writer.may_end.set()
            await tables.finish()
            assert writer.num_calls == 2
            task.cancel()

    run(scenario())


def test_without_an_export_there_is_nothing_to_wait_for() -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server:
            await TableWriter(server.hub, Writer()).finish()

    run(scenario())


def test_tables_that_cannot_be_written_are_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with ServerInThisProcess() as server, server.client() as client:
            writer = Writer("the disk is full")
            writer.may_end.set()
            tables = TableWriter(server.hub, writer)
            task = asyncio.create_task(tables.run())
            for _ in range(2):
                await events_of(client)
                await tables.finish()
            assert writer.num_calls == 2
            task.cancel()

    run(scenario())
    assert caplog.messages.count("the disk is full") == 2
