"""KV pages between two transfers of this process, over real process groups that meet at a real store."""

from __future__ import annotations

import asyncio
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from dbench.errors import ChannelBroken
from dbench.models import embedded_directory
from dbench.serve.channel import RECEIVER, SENDER, MeetingPoint, meet
from dbench.serve.families import read_model_config
from dbench.serve.kv import KvPool
from dbench.serve.kv_links import TransferConfig
from dbench.serve.meeting import Meeting
from dbench.serve.sequence import BlockKey, Refreshed, RefreshTimes
from dbench.serve.transfer import Transfer
from dbench.serve.transit import KvArrived, KvFailed, KvNews, KvSent

MODEL = read_model_config(embedded_directory())
NUM_PAGES, PAGE_SIZE = 8, 4
KEY, OTHER = BlockKey("a", 0, 0), BlockKey("b", 3, 1)
EPOCHS = count(1)
CPU = torch.device("cpu")
SHORT_S, STOPPED_S, LONG_S = 1.0, 3.0, 30.0


def refreshed(*positions: int) -> Refreshed:
    return Refreshed(positions, tuple(position + 100 for position in positions), RefreshTimes(0, 1.0, 2.0, 3.0, 3.0))


class End:
    """One worker's transfer, its pages, and what it was told."""

    def __init__(self, worker_id: int, address: str, timeout_s: float, seed: int) -> None:
        self.kv = KvPool(MODEL, num_pages=NUM_PAGES, page_size=PAGE_SIZE, like=torch.zeros(1))
        generator = torch.Generator().manual_seed(seed)
        for layer in range(self.kv.num_layers):
            num_floats = NUM_PAGES * self.kv.page_bytes // 4
            self.kv.write_pages(layer, range(NUM_PAGES), torch.rand(num_floats, generator=generator).view(torch.uint8))
        self._news: queue.SimpleQueue[KvNews] = queue.SimpleQueue()
        self.transfer = Transfer(TransferConfig(worker_id, address, timeout_s), self.kv, self._news.put)

    def next(self) -> KvNews:
        return self._news.get(timeout=LONG_S)

    @property
    def has_news(self) -> bool:
        return not self._news.empty()

    def send_whole(self, key: BlockKey, receiver_id: int, epoch: int) -> None:
        """A refresh in slot 0, over page 2, from its announcement to its end."""
        self.transfer.announce(key)
        self.transfer.begin(0, key, (2,))
        self.transfer.send(key, receiver_id, epoch)
        self.write_layers(0)
        self.transfer.finish(0, refreshed(1))

    def write_layers(self, slot: int, first: int = 0, end: int | None = None) -> None:
        for layer in range(first, self.kv.num_layers if end is None else end):
            self.transfer.layer_written((slot,), layer, lambda: None)

    def pages(self, pages: tuple[int, ...]) -> list[torch.Tensor]:
        return [self.kv.read_pages(layer, pages) for layer in range(self.kv.num_layers)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    meeting = Meeting("localhost", 0)
    asyncio.run(meeting.start())
    yield meeting.address
    meeting.close()


@pytest.fixture
def ends(address: str) -> Iterator[tuple[End, End]]:
    sender, receiver = End(0, address, LONG_S, 0), End(1, address, LONG_S, 1)
    yield sender, receiver
    sender.transfer.close()


def same(sent: list[torch.Tensor], received: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


def test_layers_go_over_as_they_are_written_and_the_end_brings_what_was_fixed(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    epoch, untouched = next(EPOCHS), receiver.pages((4, 5, 6, 7))
    receiver.transfer.expect(KEY, 0, epoch, (3, 1))
    sender.transfer.announce(KEY)
    sender.transfer.begin(5, KEY, (0, 2))
    sender.write_layers(5, end=1)
    sender.transfer.send(KEY, 1, epoch)
    sender.write_layers(5, first=1)
    sender.transfer.finish(5, refreshed(4, 6))
    assert sender.next() == KvSent(KEY, epoch)
    arrived = receiver.next()
    assert isinstance(arrived, KvArrived)
    assert (arrived.key, arrived.refreshed.positions, arrived.refreshed.token_ids) == (KEY, (4, 6), (104, 106))
    assert arrived.refreshed.times.transfer_start_s <= arrived.at_s
    assert same(sender.pages((0, 2)), receiver.pages((3, 1)))
    assert same(untouched, receiver.pages((4, 5, 6, 7)))


@pytest.mark.parametrize("when", ["before its refresh", "after its refresh"])
def test_it_does_not_matter_when_the_receiver_is_known(ends: tuple[End, End], when: str) -> None:
    sender, receiver = ends
    epoch = next(EPOCHS)
    receiver.transfer.expect(KEY, 0, epoch, (3,))
    sender.transfer.announce(KEY)
    if when == "before its refresh":
        sender.transfer.send(KEY, 1, epoch)
    sender.transfer.begin(0, KEY, (2,))
    sender.write_layers(0)
    sender.transfer.finish(0, refreshed(1))
    if when == "after its refresh":
        sender.transfer.send(KEY, 1, epoch)
    assert isinstance(receiver.next(), KvArrived)
    assert same(sender.pages((2,)), receiver.pages((3,)))


def test_blocks_of_one_batch_go_over_one_link_side_by_side(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    epoch = next(EPOCHS)
    for slot, (key, pages) in enumerate([(KEY, (0, 1)), (OTHER, (2,))]):
        receiver.transfer.expect(key, 0, epoch, tuple(page + 4 for page in pages))
        sender.transfer.announce(key)
        sender.transfer.send(key, 1, epoch)
        sender.transfer.begin(slot, key, pages)
    for layer in range(sender.kv.num_layers):
        sender.transfer.layer_written((0, 1), layer, lambda: None)
    for slot in (1, 0):
        sender.transfer.finish(slot, refreshed(slot))
    arrived = [receiver.next(), receiver.next()]
    assert {news.key for news in arrived} == {OTHER, KEY}
    assert same(sender.pages((0, 1, 2)), receiver.pages((4, 5, 6)))


def test_a_block_that_ends_before_it_has_left_is_dropped_at_the_other_end(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    epoch = next(EPOCHS)
    for key in (KEY, OTHER):
        receiver.transfer.expect(key, 0, epoch, (3,))
        sender.transfer.announce(key)
        sender.transfer.send(key, 1, epoch)
    sender.transfer.begin(0, KEY, (2,))
    sender.write_layers(0, end=1)
    sender.transfer.drop(KEY)
    sender.transfer.begin(0, OTHER, (2,))
    sender.write_layers(0)
    sender.transfer.finish(0, refreshed(1))
    assert sender.next() == KvSent(OTHER, epoch)
    arrived = receiver.next()
    assert isinstance(arrived, KvArrived)
    assert arrived.key == OTHER


def test_nothing_is_written_any_more_once_the_receiver_has_dropped_a_block(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    epoch, before = next(EPOCHS), receiver.pages((3,))
    receiver.transfer.expect(KEY, 0, epoch, (3,))
    receiver.transfer.expect(OTHER, 0, epoch, (4,))
    receiver.transfer.drop(KEY)
    for slot, key in enumerate((KEY, OTHER)):
        sender.transfer.announce(key)
        sender.transfer.send(key, 1, epoch)
        sender.transfer.begin(slot, key, (2,))
        sender.write_layers(slot)
        sender.transfer.finish(slot, refreshed(1))
    arrived = receiver.next()
    assert isinstance(arrived, KvArrived)
    assert arrived.key == OTHER
    assert same(before, receiver.pages((3,)))


def test_an_attempt_that_is_over_is_thrown_away_and_the_next_one_arrives(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    epoch, again = next(EPOCHS), BlockKey("a", 0, 1)
    receiver.transfer.expect(again, 0, epoch, (3,))
    for slot, key in enumerate((KEY, again)):
        sender.transfer.announce(key)
        sender.transfer.send(key, 1, epoch)
        sender.transfer.begin(slot, key, (slot,))
        sender.write_layers(slot)
        sender.transfer.finish(slot, refreshed(1))
    arrived = receiver.next()
    assert isinstance(arrived, KvArrived)
    assert arrived.key == again
    assert same(sender.pages((1,)), receiver.pages((3,)))


def test_sending_an_unknown_block_does_nothing(ends: tuple[End, End]) -> None:
    sender, _ = ends
    sender.transfer.send(KEY, 1, next(EPOCHS))
    assert not sender.has_news


def test_pages_of_another_size_break_the_link_with_a_reason(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    epoch = next(EPOCHS)
    receiver.transfer.expect(KEY, 0, epoch, (3, 4))
    sender.transfer.announce(KEY)
    sender.transfer.begin(0, KEY, (2,))
    sender.transfer.send(KEY, 1, epoch)
    sender.write_layers(0)
    failed = receiver.next()
    assert isinstance(failed, KvFailed)
    assert "1 pages came for a block of 2" in failed.reason


def test_a_sender_that_goes_away_ends_what_was_to_come_from_it(address: str) -> None:
    sender, receiver = End(0, address, LONG_S, 0), End(1, address, LONG_S, 1)
    epoch = next(EPOCHS)
    receiver.transfer.expect(KEY, 0, epoch, (3,))
    sender.transfer.announce(KEY)
    sender.transfer.begin(0, KEY, (2,))
    sender.transfer.send(KEY, 1, epoch)
    sender.write_layers(0, end=1)
    sender.transfer.close()
    failed = receiver.next()
    assert isinstance(failed, KvFailed)
    assert failed.key == KEY
    assert failed.reason.startswith("KV transfer from worker 0: ")
    receiver.transfer.expect(OTHER, 0, epoch, (4,))
    assert receiver.next() == KvFailed(OTHER, failed.reason, epoch, was_broken=True)


def test_a_silent_peer_is_an_end_too(address: str) -> None:
    def be_silent() -> None:
        with pytest.raises(ChannelBroken):
            meet(MeetingPoint(address, SHORT_S, CPU), f"kv-{epoch}", SENDER).receive()

    epoch = next(EPOCHS)
    receiver = End(1, address, SHORT_S, 1)
    peer = threading.Thread(target=be_silent)
    peer.start()
    receiver.transfer.expect(KEY, 0, epoch, (3,))
    assert isinstance(receiver.next(), KvFailed)
    peer.join()


def test_an_idle_link_outlives_the_timeout(address: str) -> None:
    sender, receiver = End(0, address, SHORT_S, 0), End(1, address, SHORT_S, 1)
    epoch = next(EPOCHS)
    for key in (KEY, OTHER):
        receiver.transfer.expect(key, 0, epoch, (3,))
        sender.transfer.announce(key)
        sender.transfer.begin(0, key, (2,))
        sender.transfer.send(key, 1, epoch)
        sender.write_layers(0)
        sender.transfer.finish(0, refreshed(1))
        assert isinstance(receiver.next(), KvArrived)
        time.sleep(2 * SHORT_S)
    sender.transfer.close()


def test_a_receiver_that_expects_nothing_waits_for_its_sender_as_long_as_it_takes(address: str) -> None:
    sender, receiver = End(0, address, LONG_S, 0), End(1, address, SHORT_S, 1)
    epoch = next(EPOCHS)
    receiver.transfer.expect(KEY, 0, epoch, (3,))
    receiver.transfer.drop(KEY)
    time.sleep(2 * SHORT_S)
    receiver.transfer.expect(OTHER, 0, epoch, (3,))
    sender.send_whole(OTHER, 1, epoch)
    assert isinstance(receiver.next(), KvArrived)
    sender.transfer.close()


def test_nobody_waits_for_a_sender_that_has_a_newer_link(address: str) -> None:
    receiver, sender_id = End(1, address, LONG_S, 1), 7
    for _ in range(2):
        receiver.transfer.expect(KEY, sender_id, next(EPOCHS), (3,))
        receiver.transfer.drop(KEY)
    late_s = time.monotonic() + STOPPED_S
    while (waiting := [t.name for t in threading.enumerate()].count(f"kv-from-{sender_id}")) > 1:
        assert time.monotonic() < late_s, f"{waiting} links wait for one sender"
        time.sleep(0.01)
    assert waiting == 1
    receiver.transfer.close()


def test_a_sender_that_never_comes_ends_what_was_to_come_from_it(address: str) -> None:
    receiver = End(1, address, SHORT_S, 1)
    epoch = next(EPOCHS)
    receiver.transfer.expect(KEY, 0, epoch, (3,))
    assert receiver.next() == KvFailed(KEY, "KV transfer from worker 0: it did not come within 1 s", epoch)


def test_a_block_that_is_to_go_over_a_broken_link_fails_at_once(address: str) -> None:
    sender, epoch = End(0, address, SHORT_S, 0), next(EPOCHS)
    for key, was_broken in ((KEY, False), (OTHER, True)):
        sender.transfer.announce(key)
        sender.transfer.send(key, 1, epoch)
        failed = sender.next()
        assert isinstance(failed, KvFailed)
        assert failed.was_broken is was_broken
    sender.transfer.close()


def test_a_receiver_that_never_comes_ends_what_was_to_go_there(address: str) -> None:
    sender = End(0, address, SHORT_S, 0)
    sender.transfer.announce(KEY)
    sender.transfer.begin(0, KEY, (2,))
    sender.transfer.send(KEY, 1, next(EPOCHS))
    failed = sender.next()
    assert isinstance(failed, KvFailed)
    assert failed.reason.startswith("KV transfer to worker 1: ")
    sender.transfer.close()


@contextmanager
def peer_process(address: str, epoch: int, role: str, timeout_s: float = LONG_S) -> Iterator[subprocess.Popen[str]]:
    """The other end as a process that is about to meet this one."""
    arguments = [address, str(epoch), str(timeout_s), role]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.transfer_peer", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for_word(process, "loaded")
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for_word(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{word}\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_that_dies_or_stops_in_the_middle_of_a_layer_is_an_end(address: str, number: signal.Signals) -> None:
    receiver, epoch = End(1, address, LONG_S if number is signal.SIGKILL else STOPPED_S, 1), next(EPOCHS)
    with peer_process(address, epoch, "send") as process:
        receiver.transfer.expect(KEY, 0, epoch, (3,))
        wait_for_word(process, "here")
        process.send_signal(number)
        failed = receiver.next()
        assert isinstance(failed, KvFailed)
        assert failed.key == KEY
        receiver.transfer.expect(OTHER, 0, epoch, (4,))
        assert receiver.next() == KvFailed(OTHER, failed.reason, epoch, was_broken=True)


def test_headers_come_as_they_were_sent(address: str) -> None:
    name = f"kv-{next(EPOCHS)}"
    header = {"kind": "end", "key": {"request_id": "ä", "block_index": 1, "attempt": 2}, "numbers": [1.5, None]}

    def send() -> None:
        meet(MeetingPoint(address, LONG_S, CPU), name, SENDER).send(header)

    peer = threading.Thread(target=send)
    peer.start()
    assert meet(MeetingPoint(address, LONG_S, CPU), name, RECEIVER).receive() == header
    peer.join()
