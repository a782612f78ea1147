"""Keeps the server's events: a bounded number in memory for ExportMetrics, all of them in a file if asked."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

from dbench.errors import OptionError, one_line
from dbench.events import (
    EVENTS_FILE,
    SCHEMA_VERSION,
    Event,
    SchedulerDepth,
    ServerEnded,
    ServerStarted,
    WorkerLeft,
    WorkerLost,
    WorkerState,
    WorkerUp,
    event_to_json,
)
from dbench.serve.fleet import SCHEDULER
from dbench.serve.wire import EventLines

MAX_EVENTS = 1_000_000
"""About 400 MB of lines; nobody who exports after a run comes near it."""
MAX_BATCH_LINES = 1000
MAX_BATCH_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


class Recorder:
    """Between `__enter__` and `__exit__` its file is open, and begins and ends with those of the server.

    Without a directory there is no file. What the file alone holds is in no export.
    """

    def __init__(self, directory: Path | None, max_events: int = MAX_EVENTS) -> None:
        self._directory = directory
        self._file: IO[str] | None = None
        self._lines: deque[str] = deque(maxlen=max_events)
        self._num_recorded = 0
        self._standing: dict[tuple[str, int], Event] = {}
        """What holds until an event of the same kind changes it."""

    def __enter__(self) -> Recorder:
        """Raises OptionError when the directory cannot be written."""
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = (self._directory / EVENTS_FILE).open("a", encoding="utf-8")
            except OSError as error:
                raise OptionError(
                    f"metrics_output_dir {str(self._directory)!r}: cannot be written: {error.strerror}"
                ) from error
            self._append([event_to_json(ServerStarted(time.monotonic(), SCHEDULER, time.time(), SCHEMA_VERSION))])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        reason, detail = ("ended", "") if error is None else ("failed", one_line(error))
        self._append([event_to_json(ServerEnded(time.monotonic(), SCHEDULER, reason, detail))])
        if self._file is not None:
            self._file.close()
            self._file = None

    def record(self, events: Iterable[Event]) -> None:
        """Take events in; the file has them when this returns."""
        lines = []
        for event in events:
            self._note_standing(event)
            lines.append(event_to_json(event))
        self._lines.extend(lines)
        self._num_recorded += len(lines)
        self._append(lines)

    def reset(self, now_s: float) -> None:
        """Forget everything but how things stand: workers, their states and the depth, now the first lines."""
        self._lines.clear()
        self._lines.extend(event_to_json(replace(event, at_s=now_s)) for event in self._standing.values())
        self._num_recorded = len(self._lines)

    def export(self) -> Iterator[EventLines]:
        """The lines that are kept at the time of the call, oldest first, in parts of bounded size; at least one."""
        num_forgotten = self._num_recorded - len(self._lines)
        part: list[str] = []
        num_bytes = 0
        for line in list(self._lines):
            if part and (len(part) == MAX_BATCH_LINES or num_bytes + len(line) > MAX_BATCH_BYTES):
                yield EventLines(tuple(part), num_forgotten)
                part, num_bytes = [], 0
            part.append(line)
            num_bytes += len(line)
        yield EventLines(tuple(part), num_forgotten)

    def _note_standing(self, event: Event) -> None:
        match event:
            case WorkerUp() | WorkerState():
                self._standing[(event.kind, event.worker_id)] = event
            case SchedulerDepth():
                self._standing[(event.kind, 0)] = event
            case WorkerLost() | WorkerLeft():
                self._standing.pop((WorkerUp.kind, event.worker_id), None)
                self._standing.pop((WorkerState.kind, event.worker_id), None)

    def _append(self, lines: list[str]) -> None:
        file = self._file
        if file is None or not lines:
            return
        try:
            file.write("".join(line + "\n" for line in lines))
            file.flush()
        except OSError as error:
            logger.error("%s cannot be written any more and ends here: %s", file.name, one_line(error))
            self._file = None
            with suppress(OSError):  # what it still holds cannot be written either
                file.close()
