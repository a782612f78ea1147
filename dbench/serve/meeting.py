"""The store at which workers that exchange KV meet; it runs in the server's process."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from dbench.errors import ServerStartError, one_line
from dbench.serve.address import join_host_port, listen_on

CLIENT_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class Meeting:
    """Between `start` and `close` it answers at `address`, and at no other of this machine's."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._store: object = None
        self.address = ""
        """host:port, once it is started."""

    async def start(self) -> None:
        """Raises ServerStartError."""
        await asyncio.to_thread(self._start)
        logger.debug("workers that exchange KV meet at %s", self.address)

    def _start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # only hybrid mode needs torch here

        try:
            listener = listen_on(self._host, self._port)
        except OSError as error:
            raise ServerStartError(
                f"master_addr {self._host}, master_port {self._port}: cannot listen there: {one_line(error)}"
            ) from error
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            self._host,
            port,
            is_master=True,
            timeout=timedelta(seconds=CLIENT_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.address = join_host_port(self._host, port)

    def close(self) -> None:
        self._store = None
