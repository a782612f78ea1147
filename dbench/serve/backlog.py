"""Requests that wait for a worker, oldest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from dbench.serve.tracking import TrackedRequest


class Backlog:
    """Waiting requests in the order of their submission, whenever they joined and whoever leaves meanwhile."""

    def __init__(self) -> None:
        self._waiting: dict[int, TrackedRequest] = {}  # by serial number
        self._serials: list[int] = []  # a heap; those of requests that have left are dropped when they come up
        self.num_tokens = 0
        """Canvas tokens of all of them."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, tracked: TrackedRequest) -> bool:
        return tracked.serial in self._waiting

    def __iter__(self) -> Iterator[TrackedRequest]:
        """In no order; requests may leave meanwhile."""
        return iter(list(self._waiting.values()))

    def add(self, tracked: TrackedRequest) -> None:
        assert tracked.serial not in self._waiting, f"{tracked.request.request_id} waits already"
        self._waiting[tracked.serial] = tracked
        heapq.heappush(self._serials, tracked.serial)
        self.num_tokens += tracked.shape.canvas_length

    def discard(self, tracked: TrackedRequest) -> None:
        """Take a request out; nothing if it does not wait."""
        if self._waiting.pop(tracked.serial, None) is not None:
            self.num_tokens -= tracked.shape.canvas_length

    def oldest(self) -> TrackedRequest | None:
        """Who is next; it stays."""
        while self._serials and self._serials[0] not in self._waiting:
            heapq.heappop(self._serials)
        return self._waiting[self._serials[0]] if self._serials else None
