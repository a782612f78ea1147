"""Waiting precisely, and keeping Python's own habits out of the way meanwhile."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SPIN_S = 0.001
"""epoll counts in whole milliseconds, rounded up: the last one before a send is waited out by yielding."""

SWITCH_INTERVAL_S = 0.0005
"""Python's default lets another thread, such as one that draws a live view, hold up a send by 5 ms at a time."""


async def sleep_until(due_s: float) -> None:
    """Return when the monotonic clock reads `due_s`, at once if it is past; other tasks run meanwhile."""
    while (left_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s - SPIN_S if left_s > SPIN_S else 0)


@contextmanager
def punctual() -> Iterator[None]:
    """Short turns for other threads, and short passes of the garbage collector; both for the whole process.

    What is alive at the start is taken out of the collector's sight: a full pass over a schedule of
    10,000 requests and the loaded packages takes tens of milliseconds.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
