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
        self.last_s = 0.0
        with _collector_paused():
            for event in events:
                self._by_type[type(event)].append(event)
                self.last_s = max(self.last_s, event.at_s)

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
def _collector_paused() -> Iterator[None]:
    """Events form no cycles, and looking for some among a million of them takes longer than parsing a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
