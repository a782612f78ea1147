"""The links of a KV transfer: each joins a sender and a receiver for one epoch, with a thread at either end.

Its messages name a block's attempt; what they mean to the blocks of a worker is its transfer's business.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dbench.errors import ChannelBroken
from dbench.serve.channel import RECEIVER, SENDER, Bulk, Channel, MeetingPoint, meet
from dbench.serve.kv import PageStore
from dbench.serve.sequence import BlockKey, Refreshed, RefreshTimes

ALIVE_SHARE = 4
MAX_ALIVE_S = 1.0
"""A sender is silent for at most so long, and one part in ALIVE_SHARE of the timeout."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Who this worker is to others, and where it meets them."""

    worker_id: int
    meeting_address: str
    timeout_s: float

    def meeting(self, device: torch.device) -> MeetingPoint:
        return MeetingPoint(self.meeting_address, self.timeout_s, device)


def _name(epoch: int) -> str:
    return f"kv-{epoch}"


@dataclass(slots=True, eq=False)
class Outgoing:
    """A block that is refreshed here; guarded by the lock of its owner, but for `io`."""

    key: BlockKey
    pages: tuple[int, ...] = ()
    link: SendingLink | None = None
    written: list[WrittenLayer] = field(default_factory=list)
    """In order; they can all be sent again."""
    refreshed: Refreshed | None = None
    started_s: float | None = None
    is_dropped: bool = False
    io: threading.Lock = field(default_factory=threading.Lock)
    """Held while its pages are read, and to drop it."""


@dataclass(frozen=True, slots=True)
class WrittenLayer:
    block: Outgoing
    number: int
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Finished:
    block: Outgoing


@dataclass(frozen=True, slots=True)
class Dropped:
    block: Outgoing


SendingJob = WrittenLayer | Finished | Dropped


class LinkOwner(Protocol):
    """What links tell; called in their threads."""

    @property
    def config(self) -> TransferConfig: ...

    @property
    def store(self) -> PageStore: ...

    @property
    def is_closing(self) -> bool: ...

    def expects(self, epoch: int) -> bool:
        """Something is to come over this link."""

    def sent(self, link: SendingLink, block: Outgoing) -> None:
        """Its end is out over this link."""

    def write(self, key: BlockKey, layer: int, data: Tensor, bulk: Bulk) -> None:
        """Put a layer where it belongs, if its block is still expected; return when it is there.

        Raises ValueError for a layer of another size, and ChannelBroken.
        """

    def arrived(self, key: BlockKey, refreshed: Refreshed) -> None:
        """A block's layers are all there."""

    def sending_failed(self, link: SendingLink, reason: str) -> None:
        """What was to go over this link cannot."""

    def receiving_failed(self, link: ReceivingLink, reason: str) -> None:
        """Nothing comes over this link any more."""


def _served(serve: Callable[[], None], what: str) -> str:
    """Serve a link to its end, at the edge of its thread; why that came, empty where nothing failed."""
    try:
        serve()
    except ChannelBroken as error:
        return f"{what}: {error}"
    except Exception as error:  # whatever it is, the blocks of this link must not wait for ever
        logger.exception("%s has failed", what)
        return f"{what}: {type(error).__name__}: {error}"
    return ""


class SendingLink:
    """Sends what is put into `jobs`, in order, until None."""

    def __init__(self, owner: LinkOwner, receiver_id: int, epoch: int) -> None:
        self._owner = owner
        self._receiver_id = receiver_id
        self.epoch = epoch
        self.has_met = False
        """The receiver has come, and notices how this link ends."""
        self.broken = ""
        """Why nothing can go over it any more; guarded by the lock of its owner."""
        self.jobs: queue.SimpleQueue[SendingJob | None] = queue.SimpleQueue()
        self._taken: list[SendingJob | None] = []
        """Jobs that wait in the thread, in the order of `jobs`."""
        self.thread = threading.Thread(target=self._run, name=f"kv-to-{receiver_id}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _run(self) -> None:
        reason = _served(self._meet_and_serve, f"KV transfer to worker {self._receiver_id}")
        if reason:
            logger.warning("%s", reason)
            self._owner.sending_failed(self, reason)

    def _meet_and_serve(self) -> None:
        meeting = self._owner.config.meeting(self._owner.store.device)
        with closing(meet(meeting, _name(self.epoch), SENDER)) as channel:
            self.has_met = True
            self._serve(channel)

    def _serve(self, channel: Channel) -> None:
        alive_s = min(MAX_ALIVE_S, self._owner.config.timeout_s / ALIVE_SHARE)
        while True:
            try:
                job = self._next_job(alive_s)
            except queue.Empty:
                channel.send({"kind": "alive"})
                continue
            match job:
                case None:
                    self._take_leave(channel)
                    return
                case WrittenLayer():
                    self._send_layer(channel, job)
                case Finished(block):
                    self._send_end(channel, block)
                case Dropped(block):
                    if block.started_s is not None:
                        channel.send({"kind": "drop", "key": asdict(block.key)})

    def _next_job(self, timeout_s: float) -> SendingJob | None:
        """The oldest one; but the end of a block overtakes the layers of others, which a device may still compute.

        Raises queue.Empty if none comes in time.
        """
        if not self._taken:
            self._taken.append(self.jobs.get(timeout=timeout_s))
        with suppress(queue.Empty):
            while True:
                self._taken.append(self.jobs.get_nowait())
        unsent: set[Outgoing] = set()
        for place, job in enumerate(self._taken):
            if isinstance(job, WrittenLayer):
                unsent.add(job.block)
            elif isinstance(job, Finished) and job.block not in unsent:
                return self._taken.pop(place)
        return self._taken.pop(0)

    def _take_leave(self, channel: Channel) -> None:
        """Wait until the receiver has read everything: hanging up between GPUs takes back what is still on its way."""
        with suppress(ChannelBroken):  # it hangs up first
            channel.send({"kind": "bye"})
            channel.receive()

    def _send_layer(self, channel: Channel, layer: WrittenLayer) -> None:
        block, store = layer.block, self._owner.store
        with block.io:
            if block.is_dropped or block.link is not self:
                return
            with channel.bulk.stream():
                layer.wait()
                data = store.read_pages(layer.number, block.pages)
            channel.bulk.finish()
        if block.started_s is None:
            block.started_s = time.monotonic()
        channel.send({"kind": "layer", "key": asdict(block.key), "layer": layer.number, "num_pages": len(block.pages)})
        channel.bulk.send(data)

    def _send_end(self, channel: Channel, block: Outgoing) -> None:
        assert block.refreshed is not None, f"{block.key} ends without its refresh"
        if block.is_dropped or block.link is not self:
            return
        times = block.refreshed.times
        if block.started_s is not None:
            times = replace(times, transfer_start_s=block.started_s)
        refreshed = asdict(replace(block.refreshed, times=times))
        channel.send({"kind": "end", "key": asdict(block.key), "refreshed": refreshed})
        self._owner.sent(self, block)


class ReceivingLink:
    """Takes in what one sender sends, until the channel ends."""

    def __init__(self, owner: LinkOwner, sender_id: int, epoch: int) -> None:
        self._owner = owner
        self.sender_id = sender_id
        self.epoch = epoch
        self.broken = ""
        """Why nothing comes any more; guarded by the lock of its owner."""
        self.is_replaced = False
        """The sender has a newer link: it does not come to this one any more."""
        self._num_layers: dict[BlockKey, int] = {}
        self.thread = threading.Thread(target=self._run, name=f"kv-from-{sender_id}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _run(self) -> None:
        reason = _served(self._meet_and_take, f"KV transfer from worker {self.sender_id}")
        if reason:
            logger.debug("%s", reason)
            self._owner.receiving_failed(self, reason)

    def _meet_and_take(self) -> None:
        meeting = self._owner.config.meeting(self._owner.store.device)
        with closing(meet(meeting, _name(self.epoch), RECEIVER, self._is_wanted)) as channel:
            while not self._owner.is_closing:
                self._take(channel, channel.receive())

    def _is_wanted(self) -> bool:
        if self._owner.is_closing:
            raise ChannelBroken("this worker ends")
        is_wanted = self._owner.expects(self.epoch)
        if self.is_replaced and not is_wanted:
            raise ChannelBroken("a newer link has taken its place")
        return is_wanted

    def _take(self, channel: Channel, header: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError for a message that makes no sense; ChannelBroken for the last."""
        kind, store = header["kind"], self._owner.store
        if kind == "alive":
            return
        if kind == "bye":
            channel.send({"kind": "bye"})
            raise ChannelBroken("its sender has ended")
        key = BlockKey(**header["key"])
        if kind == "layer":
            layer, num_pages = int(header["layer"]), int(header["num_pages"])
            if layer != self._num_layers.get(key, 0):
                raise ValueError(f"layer {layer} of {key} came after {self._num_layers.get(key, 0)} others")
            with channel.bulk.stream():  # memory that another stream gave back may still be in use there
                data = torch.empty(num_pages * store.page_bytes, dtype=torch.uint8, device=store.device)
                channel.bulk.receive(data)
            channel.bulk.finish()
            self._owner.write(key, layer, data, channel.bulk)
            self._num_layers[key] = layer + 1
            return
        num_layers = self._num_layers.pop(key, 0)
        if kind == "end":
            if num_layers != store.num_layers:
                raise ValueError(f"{key} ended after {num_layers} of {store.num_layers} layers")
            self._owner.arrived(key, _refreshed(header["refreshed"]))


def _refreshed(record: dict[str, Any]) -> Refreshed:
    return Refreshed(tuple(record["positions"]), tuple(record["token_ids"]), RefreshTimes(**record["times"]))
