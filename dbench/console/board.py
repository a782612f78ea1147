"""The newest snapshot and the rates derived from its forerunners, shared between threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock

from dbench.console.rates import UNKNOWN, CounterWindow, RateTable, WorkerRates
from dbench.progress import Progress, SearchProgress, ServeProgress, WorkerProgress


@dataclass(frozen=True, slots=True)
class Shown:
    """What a view draws; `progress` is None before the first snapshot."""

    progress: Progress | None
    rates: RateTable


NOTHING_YET = Shown(None, RateTable({}, UNKNOWN))


def workers_of(progress: Progress) -> tuple[WorkerProgress, ...]:
    """The workers that a snapshot shows, directly or in its running trial."""
    if isinstance(progress, SearchProgress):
        return progress.running.workers if progress.running else ()
    return progress.workers


class Board:
    """Where producers leave snapshots and a view's thread reads them; neither waits for the terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._progress: Progress | None = None
        self._workers = WorkerRates()
        self._completed = CounterWindow()

    def post(self, progress: Progress) -> None:
        now = self._clock()
        with self._lock:
            self._progress = progress
            self._workers.add(now, workers_of(progress))
            if isinstance(progress, ServeProgress):
                self._completed.add(now, (progress.num_completed,))

    def read(self) -> Shown:
        with self._lock:
            if self._progress is None:
                return NOTHING_YET
            rates = self._workers.read()
            change = self._completed.change()
            if change:
                rates = replace(rates, requests_per_s=change.counts[0] / change.seconds)
            return Shown(self._progress, rates)
