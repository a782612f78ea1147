"""KV pages on their way from one worker to another, layer by layer while the refresh still runs.

Blocks go over links (kv_links.py). Those that the receiver does not expect, or no longer, are read and thrown away.
A link that fails takes the blocks with it that were to come over it; the scheduler gives the pair of workers a new
epoch. Where they were refreshed they stay, whole, until they are dropped, or sent to another receiver. Only a link
whose ends have never met fails there too: its receiver may know nothing of that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dbench.serve.channel import Bulk
from dbench.serve.kv import PageStore
from dbench.serve.kv_links import (
    Dropped,
    Finished,
    Outgoing,
    ReceivingLink,
    SendingLink,
    TransferConfig,
    WrittenLayer,
)
from dbench.serve.sequence import BlockKey, Refreshed
from dbench.serve.transit import KvArrived, KvFailed, KvNews, KvSent

CLOSE_TIMEOUT_S = 3.0
"""For both ends: a sender that is alive says so before, and a receiver that is alive reads what is on its way."""


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A block whose KV is expected."""

    pages: tuple[int, ...]
    epoch: int


class Transfer:
    """A worker's KvTransfer, LayerWatcher, and what its stream's reader tells at once.

    `tell` gets what has come of blocks; it is called in the threads of links.
    """

    def __init__(self, config: TransferConfig, store: PageStore, tell: Callable[[KvNews], None]) -> None:
        self._config = config
        self._store = store
        self._tell = tell
        self._lock = threading.Lock()
        self._outgoing: dict[BlockKey, Outgoing] = {}
        self._by_slot: dict[int, Outgoing] = {}
        self._incoming: dict[BlockKey, _Incoming] = {}
        self._writing = threading.Lock()
        """Guards `_incoming`, and is held while pages are written."""
        self._sending: dict[int, SendingLink] = {}  # by epoch, as the next one
        self._receiving: dict[int, ReceivingLink] = {}
        self.is_closing = False

    # ---- for the reader of the worker's stream ----

    def announce(self, key: BlockKey) -> None:
        """A block has come that is refreshed here and sent elsewhere; the engine may be busy."""
        with self._lock:
            self._outgoing[key] = Outgoing(key)

    def send(self, key: BlockKey, receiver_id: int, epoch: int) -> None:
        """A block's receiver has pages: send what is written, and the rest as it comes. Nothing for unknown keys.

        If it was told of another one before, which is lost, everything goes to this one.
        """
        with self._lock:
            block = self._outgoing.get(key)
            if block is None:
                return
            if epoch not in self._sending:
                self._sending[epoch] = SendingLink(self, receiver_id, epoch)
                self._sending[epoch].start()
            block.link = link = self._sending[epoch]
            block.started_s = None
            for layer in block.written:
                link.jobs.put(layer)
            if block.refreshed is not None:
                link.jobs.put(Finished(block))
            reason = link.broken
            if reason:
                self._forget_outgoing(key)
        if reason:
            self._tell(KvFailed(key, reason, epoch, was_broken=True))

    # ---- for the runner ----

    def layer_written(self, slots: tuple[int, ...], layer: int, wait: Callable[[], None]) -> None:
        with self._lock:
            for slot in slots:
                block = self._by_slot.get(slot)
                if block is None:
                    continue
                job = WrittenLayer(block, layer, wait)
                block.written.append(job)
                if block.link is not None:
                    block.link.jobs.put(job)

    # ---- for the engine ----

    def begin(self, slot: int, key: BlockKey, pages: tuple[int, ...]) -> None:
        with self._lock:
            block = self._outgoing.setdefault(key, Outgoing(key))
            block.pages = pages
            self._by_slot[slot] = block

    def finish(self, slot: int, refreshed: Refreshed) -> None:
        with self._lock:
            block = self._by_slot.pop(slot, None)
            if block is None:  # it could not be sent, and the engine is about to hear of it
                return
            block.refreshed = refreshed
            if block.link is not None:
                block.link.jobs.put(Finished(block))

    def expect(self, key: BlockKey, sender_id: int, epoch: int, pages: tuple[int, ...]) -> None:
        with self._writing:
            self._incoming[key] = _Incoming(pages, epoch)
        with self._lock:
            if epoch not in self._receiving:
                for older in self._receiving.values():
                    older.is_replaced = older.is_replaced or older.sender_id == sender_id
                self._receiving[epoch] = ReceivingLink(self, sender_id, epoch)
                self._receiving[epoch].start()
            reason = self._receiving[epoch].broken
        if reason and self._forget_incoming(key):
            self._tell(KvFailed(key, reason, epoch, was_broken=True))

    def drop(self, key: BlockKey) -> None:
        self._forget_incoming(key)
        with self._lock:
            block = self._forget_outgoing(key)
            if block is None:
                return
            link = block.link
        with block.io:
            block.is_dropped = True
        if link is not None:
            link.jobs.put(Dropped(block))

    def close(self) -> None:
        """End the links; one that receives from a sender that hangs ends with it, or with this process."""
        self.is_closing = True
        with self._lock:
            sending, receiving = list(self._sending.values()), list(self._receiving.values())
        for link in sending:
            link.jobs.put(None)
        late_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in (*(link.thread for link in sending), *(link.thread for link in receiving)):
            thread.join(max(0.0, late_s - time.monotonic()))

    # ---- for the links ----

    @property
    def config(self) -> TransferConfig:
        return self._config

    @property
    def store(self) -> PageStore:
        return self._store

    def expects(self, epoch: int) -> bool:
        with self._writing:
            return any(block.epoch == epoch for block in self._incoming.values())

    def sent(self, link: SendingLink, block: Outgoing) -> None:
        """Its END is out: nothing of it is needed here any more, unless it goes to another receiver since."""
        with self._lock:
            is_over = block.link is link and self._forget_outgoing(block.key) is not None
        if is_over:
            self._tell(KvSent(block.key, link.epoch))

    def write(self, key: BlockKey, layer: int, data: Tensor, bulk: Bulk) -> None:
        num_pages = data.numel() // self._store.page_bytes
        with self._writing:
            block = self._incoming.get(key)
            if block is None:
                return
            if len(block.pages) != num_pages:
                raise ValueError(f"{num_pages} pages came for a block of {len(block.pages)}")
            with bulk.stream():
                self._store.write_pages(layer, block.pages, data)
            bulk.finish()  # on a device the write has only been queued: others must not get the pages before it

    def arrived(self, key: BlockKey, refreshed: Refreshed) -> None:
        if self._forget_incoming(key):
            self._tell(KvArrived(key, refreshed, time.monotonic()))

    def sending_failed(self, link: SendingLink, reason: str) -> None:
        with self._lock:
            link.broken = reason  # blocks that are to go over it from now on find it
            blocks = [block for block in self._outgoing.values() if block.link is link]
            for block in blocks:
                block.link = None
            keys = [] if link.has_met else [block.key for block in blocks]
            for key in keys:
                self._forget_outgoing(key)
        for key in keys:
            self._tell(KvFailed(key, reason, link.epoch))

    def receiving_failed(self, link: ReceivingLink, reason: str) -> None:
        with self._lock:
            link.broken = reason  # blocks that are expected from now on find it
        with self._writing:
            keys = [key for key, block in self._incoming.items() if block.epoch == link.epoch]
        for key in keys:
            if self._forget_incoming(key):
                self._tell(KvFailed(key, reason, link.epoch))

    def _forget_outgoing(self, key: BlockKey) -> Outgoing | None:
        """The lock must be held."""
        block = self._outgoing.pop(key, None)
        self._by_slot = {slot: other for slot, other in self._by_slot.items() if other is not block}
        return block

    def _forget_incoming(self, key: BlockKey) -> bool:
        """When this returns, no page of it is written any more."""
        with self._writing:
            return self._incoming.pop(key, None) is not None
