"""Who runs a trial, and until when the others leave it alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

LEASE_S = 90.0
"""A process that has not renewed its lease for this long has lost it, wherever it runs."""

RENEW_S = 20.0
"""Between renewals."""

_CLOCK_SLACK_S = 2.0  # start times of one process, read twice, differ when the wall clock is set


@dataclass(frozen=True, slots=True)
class Owner:
    """One process of one machine; a reused pid has another start time."""

    host: str
    pid: int
    started_unix_s: float


@dataclass(frozen=True, slots=True)
class Lease:
    """An owner's claim; wall clock, since it is compared across machines."""

    owner: Owner
    until_unix_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Lease:
        return cls(Owner(**record["owner"]), record["until_unix_s"])

    def is_over(self, now_unix_s: float) -> bool:
        """It ran out, or its process on this machine is gone."""
        return now_unix_s > self.until_unix_s or (self.owner.host == socket.gethostname() and not _lives(self.owner))


def this_process() -> Owner:
    """The owner that this process signs with."""
    pid = os.getpid()
    return Owner(socket.gethostname(), pid, psutil.Process(pid).create_time())


def _lives(owner: Owner) -> bool:
    try:
        process = psutil.Process(owner.pid)
        is_same = abs(process.create_time() - owner.started_unix_s) < _CLOCK_SLACK_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
