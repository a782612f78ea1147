"""What a run writes while it goes: events.jsonl, and the figures of its live view.

Percentiles here are for the eye; verdicts and reports are made from the events.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType

from dbench.errors import RunCutShort, RunError, one_line
from dbench.events import EVENTS_FILE, Event, event_to_json
from dbench.progress import RunPhase, RunProgress, WorkerProgress
from dbench.quantiles import quantile, quantiles

NUM_RECENT_ERRORS = 5
LIVE_QUANTILES = (0.50, 0.90, 0.99)


class EventWriter:
    """events.jsonl of a run directory: a line is in the file when write() returns.

    A line that could only be written in part stays the last one: readers pass over a torn last line.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS_FILE
        self._file: FileIO | None = None
        self._failure = ""

    def __enter__(self) -> EventWriter:
        """Create the directory and the file. Raises RunError if the directory holds a run already."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb", buffering=0)
        except FileExistsError:
            raise RunError(f"{self._path}: the directory already holds a run; give another one") from None
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written ({error.strerror}); choose another output_dir") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, event: Event) -> None:
        """Append one event. Raises RunCutShort, from then on always, if the system does not take it."""
        assert self._file is not None, "the log is not open"
        left = f"{event_to_json(event)}\n".encode()
        try:
            while left and not self._failure:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._failure = error.strerror or one_line(error)
        if self._failure:
            raise RunCutShort(
                f"{self._path}: no further event can be written ({self._failure}), so the run ends here; the file "
                f"holds what it measured: make room, then `dbench report {self._path.parent}` for tables and plots",
                self._path.parent,
            )


@dataclass(slots=True)
class Tally:
    """Live figures of one run; the measured requests only, but for `in_flight` and the workers."""

    name: str
    target: str
    num_requests: int
    offered_qps: float
    started_s: float = field(default_factory=time.monotonic)
    """t = 0, once measuring has begun."""
    phase: RunPhase = RunPhase.STARTING
    last_arrival_s: float | None = None
    """When the last measured request is due; None in a closed loop."""
    in_flight: int = 0
    num_sent: int = 0
    num_failed: int = 0
    latencies_s: list[float] = field(default_factory=list)
    """Of the completed requests, from the intended send."""
    lags_s: list[float] = field(default_factory=list)
    """Actual - intended send."""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_ERRORS))
    workers: tuple[WorkerProgress, ...] = ()

    @property
    def num_done(self) -> int:
        return len(self.latencies_s) + self.num_failed

    def begin(self, started_s: float, last_arrival_s: float | None) -> None:
        """Measuring starts at `started_s`."""
        self.started_s = started_s
        self.last_arrival_s = last_arrival_s
        self.phase = RunPhase.MEASURING

    def sent(self, lag_s: float) -> None:
        """A measured request has left."""
        self.num_sent += 1
        if self.num_sent == self.num_requests:
            self.phase = RunPhase.DRAINING
        self.lags_s.append(lag_s)

    def completed(self, latency_s: float) -> None:
        """A measured request has its result."""
        self.latencies_s.append(latency_s)

    def failed(self, error: str | None) -> None:
        """A measured request has ended without a result; None: that is no news."""
        self.num_failed += 1
        if error is not None:
            self.errors.append(error)

    def progress(self) -> RunProgress:
        """The figures of this moment."""
        elapsed_s = max(0.0, time.monotonic() - self.started_s)
        p50, p90, p99 = _percentiles(self.latencies_s)
        achieved_qps = len(self.latencies_s) / elapsed_s if elapsed_s > 0 else 0.0
        return RunProgress(
            name=self.name,
            target=self.target,
            phase=self.phase,
            elapsed_s=elapsed_s,
            eta_s=self._eta_s(achieved_qps, p50 or 0.0),
            num_requests=self.num_requests,
            num_sent=self.num_sent,
            num_completed=len(self.latencies_s),
            num_failed=self.num_failed,
            in_flight=self.in_flight,
            offered_qps=self.offered_qps,
            achieved_qps=achieved_qps,
            latency_p50_s=p50,
            latency_p90_s=p90,
            latency_p99_s=p99,
            lag_p99_s=quantile(self.lags_s, 0.99) if self.lags_s else None,
            workers=self.workers,
            recent_errors=tuple(self.errors),
        )

    def _eta_s(self, achieved_qps: float, median_s: float) -> float | None:
        """Until the last arrival and one median latency later; past it, the open requests at the rate so far."""
        if self.phase not in (RunPhase.MEASURING, RunPhase.DRAINING) or achieved_qps == 0:
            return None
        at_this_rate_s = (self.num_requests - self.num_done) / achieved_qps
        if self.last_arrival_s is None or self.phase is RunPhase.DRAINING:
            return at_this_rate_s
        return max(self.last_arrival_s - time.monotonic() + median_s, 0.0)


def _percentiles(values: list[float]) -> list[float | None]:
    return list(quantiles(values, LIVE_QUANTILES)) if values else [None] * len(LIVE_QUANTILES)
