"""What can end a run before its last request: stop rules, and signals.

A rule is told of every measured request and is asked a few times a second. It never decides what a run
is worth; it says that going on cannot change the answer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SentFact:
    """A measured request is on its way; times are the client's monotonic clock."""

    index: int
    intended_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class DoneFact:
    """A measured request has ended."""

    index: int
    intended_s: float
    done_s: float
    completed: bool
    """False for anything but COMPLETED."""

    @property
    def latency_s(self) -> float:
        """From the intended send."""
        return self.done_s - self.intended_s


class StopRule(Protocol):
    """Watches the measured requests of one run."""

    def sent(self, fact: SentFact) -> None:
        """Called once per measured request, before its `done`."""

    def done(self, fact: DoneFact) -> None:
        """Called when it ends."""

    def reason(self, now_s: float) -> str | None:
        """One line that ends the run, or None to go on; `now_s` is on the clock of the facts."""


@dataclass(slots=True)
class Signals:
    """What became of the first SIGINT or SIGTERM."""

    came: bool = False
    has_cancelled: bool = False
    """It reached the task; else the task had ended by itself before the event loop could tell it."""


@contextmanager
def cancel_on_signals() -> Iterator[Signals]:
    """The first SIGINT or SIGTERM cancels the current task; the next one does what it did before.

    For a coroutine in the main thread. `driver.run_load` ends well when it is cancelled.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "outside a task"
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signals = Signals()

    def give_back() -> None:
        for number, handler in before.items():
            if handler is not None:  # None: set by code outside Python
                signal.signal(number, handler)

    def cancel() -> None:
        signals.has_cancelled = task.cancel()

    def first(_number: int, _frame: object) -> None:
        # At once, not in the loop's next turn as loop.add_signal_handler does: there may be none any more.
        signals.came = True
        give_back()
        loop.call_soon_threadsafe(cancel)

    for number in before:
        signal.signal(number, first)
    try:
        yield signals
    finally:
        give_back()


def run_cancellable(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end in a new event loop.

    Raises KeyboardInterrupt when a signal ended the work without a result, and when one came too late for the
    work to notice: its caller would go on as if nothing had been said.
    """

    async def cancellable() -> tuple[T, Signals]:
        with cancel_on_signals() as signals:
            return await work(), signals

    try:
        result, signals = asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if signals.came and not signals.has_cancelled:
        raise KeyboardInterrupt
    return result
