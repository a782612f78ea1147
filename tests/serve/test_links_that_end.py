"""A link that its sender ends: nothing that was sent over it may be lost with it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import torch

from dbench.serve.channel import RECEIVER, MeetingPoint, meet
from dbench.serve.meeting import Meeting
from dbench.serve.transit import KvSent
from tests.serve.test_transfer import CPU, EPOCHS, KEY, LONG_S, End


def test_a_sender_hangs_up_when_its_receiver_has_read_everything() -> None:
    order: list[str] = []
    meeting = Meeting("localhost", 0)
    asyncio.run(meeting.start())
    sender, epoch = End(0, meeting.address, LONG_S, 0), next(EPOCHS)

    def receive_slowly() -> None:
        channel = meet(MeetingPoint(meeting.address, LONG_S, CPU), f"kv-{epoch}", RECEIVER)
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
    meeting.close()
    assert order == ["layer"] * sender.kv.num_layers + ["end", "bye", "read", "hung up"]
