"""When something ends in the middle: nothing that was sent is lost, and nothing is written to pages of others."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbench.errors import ChannelBroken
from dbench.serve import channel
from dbench.serve.channel import RECEIVER, Bulk, MeetingPoint, meet
from dbench.serve.meeting import Meeting
from dbench.serve.transit import KvArrived, KvFailed, KvSent
from tests.serve.test_transfer import (
    CPU,
    EPOCHS,
    KEY,
    LONG_S,
    OTHER,
    STOPPED_S,
    End,
    peer_process,
    refreshed,
    same,
    wait_for_word,
)


@pytest.fixture
def address() -> Iterator[str]:
    meeting = Meeting("localhost", 0)
    asyncio.run(meeting.start())
    yield meeting.address
    meeting.close()


def test_a_receiver_looks_for_its_sender_seldom_while_nothing_is_to_come(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes, pauses = iter([True, False, False, True]), list[float]()

    def is_wanted() -> bool:
        for wish in wishes:
            return wish
        raise ChannelBroken("enough")

    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    with pytest.raises(ChannelBroken, match="enough"):
        meet(MeetingPoint(address, LONG_S, CPU), f"kv-{next(EPOCHS)}", RECEIVER, is_wanted)
    often, seldom = channel.STORE_POLL_S, channel.IDLE_STORE_POLL_S
    assert pauses == [often, seldom, seldom, often]
    assert seldom >= 10 * often


class SlowDevice(Bulk):
    """What is queued on it is done when the test says so."""

    def __init__(self) -> None:
        self.has_queued, self.may_go_on = threading.Event(), threading.Event()

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, data: Tensor) -> None:
        raise AssertionError("nothing is sent here")

    def receive(self, into: Tensor) -> None:
        raise AssertionError("nothing is received here")

    def finish(self) -> None:
        self.has_queued.set()
        assert self.may_go_on.wait(LONG_S)

    def close(self) -> None:
        """Nothing is open."""


def test_a_dropped_block_keeps_its_pages_until_what_the_device_has_queued_for_them_is_written(address: str) -> None:
    receiver, device = End(1, address, LONG_S, 1), SlowDevice()
    order: list[str] = []

    def drop() -> None:
        receiver.transfer.drop(KEY)
        order.append("dropped")

    receiver.transfer.expect(KEY, 0, next(EPOCHS), (3,))
    data = torch.zeros(receiver.kv.page_bytes, dtype=torch.uint8)
    writing = threading.Thread(target=receiver.transfer.write, args=(KEY, 0, data, device))
    dropping = threading.Thread(target=drop)
    writing.start()
    assert device.has_queued.wait(LONG_S)
    dropping.start()
    dropping.join(0.2)
    order.append("written")
    device.may_go_on.set()
    for thread in (writing, dropping):
        thread.join()
    receiver.transfer.close()
    assert order == ["written", "dropped"]


def read_all(sender: End, address: str, epoch: int, order: list[str], pause_s: float = 0.0) -> None:
    """What comes over a link, to its end, in order; the goodbye is answered after the pause."""
    incoming = meet(MeetingPoint(address, LONG_S, CPU), f"kv-{epoch}", RECEIVER)
    header: dict[str, Any] = {}
    while header.get("kind") != "bye":
        header = incoming.receive()
        order.append(header["kind"])
        if header["kind"] == "layer":
            incoming.bulk.receive(torch.empty(sender.kv.page_bytes, dtype=torch.uint8))
    if pause_s:
        time.sleep(pause_s)
        order.append("read")
    incoming.send({"kind": "bye"})
    incoming.close()


def test_a_sender_hangs_up_when_its_receiver_has_read_everything(address: str) -> None:
    order: list[str] = []
    sender, epoch = End(0, address, LONG_S, 0), next(EPOCHS)

    thread = threading.Thread(target=read_all, args=(sender, address, epoch, order), kwargs={"pause_s": 0.2})
    thread.start()
    sender.send_whole(KEY, 1, epoch)
    assert sender.next() == KvSent(KEY, epoch)
    sender.transfer.close()
    order.append("hung up")
    thread.join()
    assert order == ["layer"] * sender.kv.num_layers + ["end", "bye", "read", "hung up"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_block_whose_receiver_dies_or_stops_can_be_sent_to_another(address: str, number: signal.Signals) -> None:
    sender, epoch = End(0, address, STOPPED_S if number is signal.SIGSTOP else LONG_S, 0), next(EPOCHS)
    with peer_process(address, epoch, "receive") as process:
        for slot, key in enumerate((KEY, OTHER)):
            sender.transfer.announce(key)
            sender.transfer.begin(slot, key, (2,))
            sender.transfer.send(key, 1, epoch)
        sender.write_layers(0, end=1)
        wait_for_word(process, "here")
        process.send_signal(number)
        if number is signal.SIGKILL:
            process.wait()
        sender.transfer.layer_written((1,) * 20_000, 0, lambda: None)  # more than the sockets hold
        wait_for_end_of("kv-to-1")
    assert not sender.has_news
    again, receiver = next(EPOCHS), End(2, address, LONG_S, 1)
    receiver.transfer.expect(KEY, 0, again, (3,))
    sender.transfer.send(KEY, 2, again)
    sender.write_layers(0, first=1)
    sender.transfer.finish(0, refreshed(1))
    assert isinstance(receiver.next(), KvArrived)
    assert sender.next() == KvSent(KEY, again)
    assert same(sender.pages((2,)), receiver.pages((3,)))
    sender.transfer.close()


def test_a_block_goes_to_another_receiver_while_the_first_is_still_awaited(address: str) -> None:
    sender, receiver = End(0, address, LONG_S, 0), End(2, address, LONG_S, 1)
    first, again = next(EPOCHS), next(EPOCHS)
    sender.send_whole(KEY, 1, first)
    receiver.transfer.expect(KEY, 0, again, (3,))
    sender.transfer.send(KEY, 2, again)
    assert isinstance(receiver.next(), KvArrived)
    assert sender.next() == KvSent(KEY, again)
    late = End(1, address, LONG_S, 2)
    for key in (KEY, OTHER):
        late.transfer.expect(key, 0, first, (4,))
    sender.transfer.close()
    assert all(isinstance(late.next(), KvFailed) for _ in (KEY, OTHER))
    assert not sender.has_news


def test_the_end_of_a_block_does_not_wait_for_the_layers_of_the_next_batch(address: str) -> None:
    order: list[str] = []
    sender, epoch = End(0, address, LONG_S, 0), next(EPOCHS)
    is_computed, has_begun = threading.Event(), threading.Event()

    def compute() -> None:
        has_begun.set()
        assert is_computed.wait(LONG_S)

    thread = threading.Thread(target=read_all, args=(sender, address, epoch, order))
    thread.start()
    for slot, key in enumerate((KEY, OTHER)):
        sender.transfer.announce(key)
        sender.transfer.begin(slot, key, (slot,))
        sender.transfer.send(key, 1, epoch)
    sender.write_layers(0)
    sender.transfer.layer_written((1,), 0, compute)
    sender.write_layers(1, first=1)
    assert has_begun.wait(LONG_S)
    for slot in (0, 1):
        sender.transfer.finish(slot, refreshed(1))
    is_computed.set()
    assert [sender.next() for _ in range(2)] == [KvSent(KEY, epoch), KvSent(OTHER, epoch)]
    sender.transfer.close()
    thread.join()
    num_layers = sender.kv.num_layers
    assert order == ["layer"] * (num_layers + 1) + ["end"] + ["layer"] * (num_layers - 1) + ["end", "bye"]


def wait_for_end_of(thread: str) -> None:
    late_s = time.monotonic() + LONG_S
    while thread in (running.name for running in threading.enumerate()):
        assert time.monotonic() < late_s, f"{thread} goes on"
        time.sleep(0.01)
