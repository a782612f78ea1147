"""Rates of counters over a sliding window: snapshots carry totals, people want tokens per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dbench.progress import WorkerProgress

WINDOW_S = 10.0
SHORTEST_S = 0.5
"""Differences over less time than this say nothing."""
SPACING_S = 0.25
"""Samples closer than this replace one another, so that a window holds few of them."""
BUCKET_S = 2.0
NUM_BUCKETS = 60


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of one worker, or of all; None where the window does not say."""

    tokens_per_s: float | None
    tokens_per_pass: float | None
    history: tuple[float, ...] = ()
    """Tokens per second in the last intervals of BUCKET_S, oldest first."""


@dataclass(frozen=True, slots=True)
class Change:
    """By how much counters grew, and in how much time."""

    seconds: float
    counts: tuple[int, ...]


UNKNOWN = Rate(None, None)


class CounterWindow:
    """Samples of counters that only grow, for the last WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def add(self, now: float, counts: tuple[int, ...]) -> bool:
        """Take a sample; False if a counter fell (its owner was restarted) and the window began anew."""
        samples = self._samples
        restarted = bool(samples) and any(new < old for new, old in zip(counts, samples[-1][1], strict=True))
        if restarted:
            samples.clear()
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < SPACING_S:
            samples.pop()
        samples.append((now, counts))
        while len(samples) > 2 and now - samples[1][0] >= WINDOW_S:
            samples.popleft()
        return not restarted

    def change(self) -> Change | None:
        """Growth between the oldest and the newest sample; None while they are too close."""
        if not self._samples:
            return None
        (then, old), (now, new) = self._samples[0], self._samples[-1]
        if now - then < SHORTEST_S:
            return None
        return Change(now - then, tuple(n - o for n, o in zip(new, old, strict=True)))


class _WorkerWindow:
    """Tokens and passes of one worker: the window, and buckets of tokens per second behind it."""

    def __init__(self) -> None:
        self._window = CounterWindow()
        self._buckets: deque[float] = deque(maxlen=NUM_BUCKETS)
        self._bucket_start: tuple[float, int] | None = None

    def add(self, now: float, worker: WorkerProgress) -> None:
        if not self._window.add(now, (worker.num_unmasked_tokens, worker.num_forward_passes)):
            self._bucket_start = None
        if self._bucket_start is None:
            self._bucket_start = (now, worker.num_unmasked_tokens)
        start, tokens = self._bucket_start
        if now - start >= BUCKET_S:
            self._buckets.append((worker.num_unmasked_tokens - tokens) / (now - start))
            self._bucket_start = (now, worker.num_unmasked_tokens)

    def change(self) -> Change | None:
        return self._window.change()

    def rate(self) -> Rate:
        return _rate([change] if (change := self.change()) else [], tuple(self._buckets))


class WorkerRates:
    """Speed of every worker of a server, from successive snapshots of their counters."""

    def __init__(self) -> None:
        self._windows: dict[int, _WorkerWindow] = {}

    def add(self, now: float, workers: Iterable[WorkerProgress]) -> None:
        """Take the counters of all workers at `now` (monotonic seconds); absent workers are forgotten."""
        self._windows = {w.worker_id: self._windows.get(w.worker_id, _WorkerWindow()) for w in workers}
        for worker in workers:
            self._windows[worker.worker_id].add(now, worker)

    def read(self) -> RateTable:
        changes = [c for w in self._windows.values() if (c := w.change())]
        return RateTable({i: w.rate() for i, w in self._windows.items()}, _rate(changes, ()))


@dataclass(frozen=True, slots=True)
class RateTable:
    """The rates at one moment."""

    by_worker: dict[int, Rate]
    total: Rate
    requests_per_s: float | None = None

    def of(self, worker_id: int) -> Rate:
        return self.by_worker.get(worker_id, UNKNOWN)


def _rate(changes: list[Change], history: tuple[float, ...]) -> Rate:
    if not changes:
        return Rate(None, None, history)
    tokens = sum(c.counts[0] for c in changes)
    passes = sum(c.counts[1] for c in changes)
    speed = sum(c.counts[0] / c.seconds for c in changes)
    return Rate(speed, tokens / passes if passes > 0 else None, history)
