"""What a server and its workers leave behind: processes, listening sockets, files.

Its processes are known by the folder for temporary files that only they were given, whoever their parents are by now.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dbench.serve.address import join_host_port
from tests.serve.process_builders import is_gone


@dataclass(slots=True)
class Household:
    """All that had one TMPDIR, as far as anybody has looked."""

    temporary: Path
    addresses: dict[psutil.Process, set[str]] = field(default_factory=dict)
    """host:port of the sockets at which each process was ever seen to listen."""

    def look(self) -> None:
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.environ().get("TMPDIR") != str(self.temporary):
                    continue
                known = self.addresses.setdefault(process, set())
                known |= _listening(process.net_connections("tcp"))
            except psutil.Error:  # it has ended meanwhile, or belongs to somebody else
                continue

    def left(self) -> list[str]:
        """What is there, of all that was ever seen and of what may have come since; empty at the end of everything."""
        self.look()
        processes = [f"process {process.pid}" for process in self.addresses if not is_gone(process)]
        open_now = _listening(psutil.net_connections("tcp"))
        ports = [f"port {address}" for known in self.addresses.values() for address in known & open_now]
        files = [f"file {path.relative_to(self.temporary)}" for path in self.temporary.rglob("*")]
        return sorted({*processes, *ports, *files})


def _listening(sockets: Iterable[Any]) -> set[str]:
    """As host:port; IPv4 addresses as themselves, even where a socket takes both kinds."""
    addresses = [socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return {join_host_port(host.removeprefix("::ffff:"), port) for host, port in addresses}
