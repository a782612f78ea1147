"""Waiting precisely, and keeping the garbage collector out of the way meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

SPIN_S = 0.001
"""epoll counts in whole milliseconds, rounded up: the last one before a send is waited out by yielding."""


async def sleep_until(due_s: float) -> None:
    """Return when the monotonic clock reads `due_s`, at once if it is past; other tasks run meanwhile."""
    while (left_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s - SPIN_S if left_s > SPIN_S else 0)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Take everything alive out of the garbage collector's sight, so that its full passes stay short.

    A full pass over a schedule of 10,000 requests and the loaded packages takes tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
