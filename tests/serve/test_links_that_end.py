"""When something ends in the middle: nothing that was sent is lost, and nothing is written to pages of others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from dbench.serve.channel import RECEIVER, Bulk, MeetingPoint, meet
from dbench.serve.meeting import Meeting
from dbench.serve.transit import KvSent
from tests.serve.test_transfer import CPU, EPOCHS, KEY, LONG_S, End


@pytest.fixture
def address() -> Iterator[str]:
    meeting = Meeting("localhost", 0)
    asyncio.run(meeting.start())
    yield meeting.address
    meeting.close()


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


def test_a_sender_hangs_up_when_its_receiver_has_read_everything(address: str) -> None:
    order: list[str] = []
    sender, epoch = End(0, address, LONG_S, 0), next(EPOCHS)

    def receive_slowly() -> None:
        channel = meet(MeetingPoint(address, LONG_S, CPU), f"kv-{epoch}", RECEIVER)
        header: dict[str, Any] = {}
        while header.get("kind") != "bye":
            header = channel.receive()
            order.append(header["kind"])
            if header["kind"] == "layer":
                channel.bulk.receive(torch.empty(sender.kv.page_bytes, dtype=torch.uint8))
        time.sleep(0.2)
        order.append("read")
        channel.send({"kind": "bye"})
        channel.close()

    thread = threading.Thread(target=receive_slowly)
    thread.start()
    sender.send_whole(KEY, 1, epoch)
    assert sender.next() == KvSent(KEY)
    sender.transfer.close()
    order.append("hung up")
    thread.join()
    assert order == ["layer"] * sender.kv.num_layers + ["end", "bye", "read", "hung up"]
