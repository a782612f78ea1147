"""What the host hears of a CUDA device: when its work was done, and that it is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dbench.errors import DeviceLost, one_line


class DeviceClock:
    """Completion times on the host's monotonic clock, exact also where the host comes late to read them."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._last_s = 0.0

    def wait(self, completed: torch.cuda.Event) -> float:
        """Wait for an event; returns when it happened. Events are waited for in order."""
        was_late = completed.query()
        completed.synchronize()
        now_s = time.monotonic()
        if was_late and self._last is not None:
            now_s = min(now_s, self._last_s + self._last.elapsed_time(completed) / 1e3)
        self._last, self._last_s = completed, now_s
        return now_s

    def forget(self, event: torch.cuda.Event) -> None:
        """The event is to be recorded anew, so nothing can be timed from it any more.

        Only a launch that failed brings this about: it took staging that the launches around it would have kept apart.
        """
        if self._last is event:
            self._last = None


@contextmanager
def device_lost_if_it_fails(device: torch.device) -> Iterator[None]:
    """Raises DeviceLost for an error of the device itself, after which it computes nothing any more.

    Running out of memory is none: that is the batch's.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"{device}: {one_line(error)}") from error
