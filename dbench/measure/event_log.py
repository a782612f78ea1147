"""The events of a file, by type."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

from dbench.events import Event

E = TypeVar("E", bound=Event)


class EventLog:
    """Each type's events in file order."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_type: dict[type[Event], list[Event]] = defaultdict(list)
        last_s = 0.0
        for event in events:
            self._by_type[event.__class__].append(event)
            if event.at_s > last_s:  # a third of the time that max() takes, a million times over
                last_s = event.at_s
        self.last_s = last_s

    def of(self, kind: type[E]) -> list[E]:
        return cast(list[E], self._by_type.get(kind, []))

    def last(self, kind: type[E]) -> E | None:
        found = self.of(kind)
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of the file's clock that a run is about."""

    start_s: float
    """t = 0: the first intended send of a measured request."""
    end_s: float
    """When the last measured request was final; the last event where one is not."""

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@contextmanager
def collector_paused() -> Iterator[None]:
    """Events and columns form no cycles; looking for some among a million events takes as long as reading a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
