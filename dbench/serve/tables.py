"""Tables of what a server has recorded, written when somebody has exported its metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from dbench.errors import DbenchError
from dbench.serve.hub import Hub

logger = logging.getLogger(__name__)


class TableWriter:
    """Calls `write` after exports: never twice at a time, and once for all exports that came meanwhile."""

    def __init__(self, hub: Hub, write: Callable[[], Awaitable[None]]) -> None:
        self._hub = hub
        self._write = write
        self._num_written = 0

    @property
    def is_done(self) -> bool:
        """Every export has its tables."""
        return self._num_written == self._hub.num_exports

    async def run(self) -> None:
        """Until cancelled. Tables that cannot be written are an error in the log and nothing else."""
        while True:
            await self._hub.until_news(lambda: not self.is_done)
            num_exports = self._hub.num_exports
            try:
                await self._write()
            except DbenchError as error:
                logger.error("%s", error)
            self._num_written = num_exports
            self._hub.announce()

    async def finish(self) -> None:
        """Wait for the tables of the exports so far."""
        await self._hub.until_news(lambda: self.is_done)
