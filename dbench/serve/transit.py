"""Blocks that hold KV pages and no slot: in hybrid mode, those on their way from one worker to another.

On the worker that refreshes, a block whose refresh has landed keeps its pages until its KV has been sent. On the one
that decodes, a block has pages from the moment it is announced, and waits for its KV and then for a slot.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as ReadableSequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from dbench.serve.pages import PagePool
from dbench.serve.policy import QueueKey
from dbench.serve.sequence import BlockKey, BlockTask, Refreshed


class KvTransfer(Protocol):
    """Sends and receives the K and V of blocks beside the engine, which is told when a block has been sent or has come.

    The engine's thread calls these; all but `drop` return at once.
    """

    def begin(self, slot: int, key: BlockKey, pages: tuple[int, ...]) -> None:
        """A block's refresh is about to be launched in this slot: its layers may be sent as they are written."""

    def finish(self, slot: int, refreshed: Refreshed) -> None:
        """The refresh in this slot has landed, with masks left; the slot is about to be given to others."""

    def expect(self, key: BlockKey, sender_id: int, epoch: int, pages: tuple[int, ...]) -> None:
        """The sender will send a block's KV, over the link of this epoch; it goes into these pages."""

    def drop(self, key: BlockKey) -> None:
        """Forget a block, known or not: when this returns, its pages are neither read nor written any more."""


@dataclass(frozen=True, slots=True)
class KvSent:
    """A block's KV has been sent."""

    key: BlockKey
    epoch: int
    """Of the link that it went over."""


@dataclass(frozen=True, slots=True)
class KvArrived:
    """A block's KV is all there."""

    key: BlockKey
    refreshed: Refreshed
    at_s: float
    """The worker's monotonic clock."""


@dataclass(frozen=True, slots=True)
class KvFailed:
    """A block's KV cannot be sent, or will not come."""

    key: BlockKey
    reason: str
    epoch: int
    """Of the link that it was to go over."""
    was_broken: bool = False
    """Its link had broken before it was to go over it."""


KvNews = KvSent | KvArrived | KvFailed


@dataclass(frozen=True, slots=True)
class Arrived:
    """A block whose KV is all there."""

    order: QueueKey
    task: BlockTask
    pages: tuple[int, ...]
    refreshed: Refreshed
    arrived_s: float


@dataclass(frozen=True, slots=True)
class _Expected:
    order: QueueKey
    task: BlockTask
    pages: tuple[int, ...]


_BY_ORDER = attrgetter("order")


class Transit:
    """The blocks in transit of one engine; without a transfer there are none."""

    def __init__(self, pages: PagePool, transfer: KvTransfer | None) -> None:
        self._pages = pages
        self._transfer = transfer
        self._kept: dict[BlockKey, tuple[int, ...]] = {}
        self._expected: dict[BlockKey, _Expected] = {}
        self._arrived: list[Arrived] = []  # sorted by order

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return (*self._kept, *self._expected, *(block.task.key for block in self._arrived))

    @property
    def is_empty(self) -> bool:
        return not (self._kept or self._expected or self._arrived)

    @property
    def arrived(self) -> ReadableSequence[Arrived]:
        """Those that wait for a slot alone, in queue order."""
        return self._arrived

    @property
    def transfer(self) -> KvTransfer:
        assert self._transfer is not None, "a block of a worker that exchanges no KV is in transit"
        return self._transfer

    # ---- where blocks are refreshed ----

    def keep(self, key: BlockKey, slot: int, pages: tuple[int, ...], refreshed: Refreshed) -> None:
        """A refresh has landed; its pages stay lent."""
        self._kept[key] = pages
        self.transfer.finish(slot, refreshed)

    def sent(self, key: BlockKey) -> bool:
        """A block's KV has been sent: its pages are free. False for a block that has been dropped since."""
        pages = self._kept.pop(key, None)
        if pages is not None:
            self._pages.give(pages)
        return pages is not None

    # ---- where they are decoded ----

    def reserve(self, task: BlockTask, order: QueueKey, sender_id: int, epoch: int) -> bool:
        """Take pages for a block and expect its KV; False when too few are free."""
        pages = self._pages.take(task.canvas_length)
        if pages is None:
            return False
        self._expected[task.key] = _Expected(order, task, pages)
        self.transfer.expect(task.key, sender_id, epoch, pages)
        return True

    def arrive(self, key: BlockKey, refreshed: Refreshed, at_s: float) -> None:
        """A block's KV is all there; nothing for a block that has been dropped since."""
        expected = self._expected.pop(key, None)
        if expected is not None:
            arrived = Arrived(expected.order, expected.task, expected.pages, refreshed, at_s)
            insort(self._arrived, arrived, key=_BY_ORDER)

    def leave(self, count: int) -> None:
        """The first of the arrived blocks have got slots; with their pages they are somebody else's now."""
        del self._arrived[:count]

    # ---- both ----

    def drop(self, key: BlockKey) -> bool:
        """Give a block's pages back, whatever it waits for; False if it is not here."""
        pages = self._pages_of(key)
        if pages is None:
            return False
        self.transfer.drop(key)
        self._kept.pop(key, None)
        self._expected.pop(key, None)
        self._arrived = [block for block in self._arrived if block.task.key != key]
        self._pages.give(pages)
        return True

    def _pages_of(self, key: BlockKey) -> tuple[int, ...] | None:
        if key in self._kept:
            return self._kept[key]
        if key in self._expected:
            return self._expected[key].pages
        return next((block.pages for block in self._arrived if block.task.key == key), None)
