"""A scheduler and its workers in one thread: real engines on scripted runners, and a wire of messages for their KV.

Who moves next is up to the test, so that messages cross in every order that real processes could bring about.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from dbench.options import PREFILL
from dbench.serve.engine import Engine
from dbench.serve.engine_state import EngineLimits
from dbench.serve.fake_runner import NUM_LAYERS, FakeScript, ManualClock
from dbench.serve.fleet import WorkerPhase
from dbench.serve.pages import PagePool
from dbench.serve.sequence import BlockEnd, BlockKey, BlockTask, HandedOver, Refreshed
from dbench.serve.tracking import TrackedRequest
from dbench.serve.transit import KvArrived, KvFailed, KvNews, KvSent
from dbench.serve.wire import Submission
from dbench.serve.wire_link import CancelBlock, Command, ReserveBlock, RunBlock, SendBlock
from tests.serve.engine_builders import EOS, PAGE_SIZE, RecordingRunner
from tests.serve.scheduler_builders import BLOCK, Hybrid, Rig, rules

MAX_CANVAS = 64


@dataclass(eq=False)
class Outgoing:
    """A block on the worker that refreshes it, as its wire knows it."""

    key: BlockKey
    num_written: int = 0
    refreshed: Refreshed | None = None
    target: tuple[int, int] | None = None
    """Receiver and epoch."""


@dataclass
class Wire:
    """A KvTransfer and LayerWatcher that puts whole blocks into the world's mail."""

    world: World
    worker_id: int
    outgoing: dict[BlockKey, Outgoing] = field(default_factory=dict)
    by_slot: dict[int, Outgoing] = field(default_factory=dict)
    expected: dict[BlockKey, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    """Key -> sender, epoch and pages."""

    def begin(self, slot: int, key: BlockKey, pages: tuple[int, ...]) -> None:
        self.by_slot[slot] = self.outgoing.setdefault(key, Outgoing(key))

    def layer_written(self, slots: tuple[int, ...], layer: int, wait: object) -> None:
        for slot in slots:
            block = self.by_slot.get(slot)
            if block is not None:
                assert layer == block.num_written, f"layer {layer} of {block.key} after {block.num_written} others"
                block.num_written += 1

    def finish(self, slot: int, refreshed: Refreshed) -> None:
        block = self.by_slot.pop(slot, None)
        if block is not None:
            block.refreshed = refreshed
            self._send(block)

    def send(self, key: BlockKey, receiver_id: int, epoch: int) -> None:
        block = self.outgoing.get(key)
        if block is None:
            return
        if epoch in self.world.broken:
            self.drop(key)
            self.world.tell(self.worker_id, KvFailed(key, "the link is broken", epoch, was_broken=True))
            return
        block.target = (receiver_id, epoch)
        self._send(block)

    def expect(self, key: BlockKey, sender_id: int, epoch: int, pages: tuple[int, ...]) -> None:
        taken = {page for *_, others in self.expected.values() for page in others}
        assert taken.isdisjoint(pages), "pages are expected to be filled by two blocks"
        self.expected[key] = (sender_id, epoch, pages)
        if epoch in self.world.broken:
            del self.expected[key]
            self.world.tell(self.worker_id, KvFailed(key, "the link is broken", epoch, was_broken=True))

    def drop(self, key: BlockKey) -> None:
        self.expected.pop(key, None)
        block = self.outgoing.pop(key, None)
        self.by_slot = {slot: other for slot, other in self.by_slot.items() if other is not block}

    def _send(self, block: Outgoing) -> None:
        if block.target is None or block.refreshed is None:
            return
        assert block.num_written == NUM_LAYERS, f"{block.key} was refreshed in {block.num_written} layers"
        receiver_id, epoch = block.target
        del self.outgoing[block.key]
        if epoch in self.world.broken:
            block.target = None
            self.outgoing[block.key] = block  # its receiver will be heard of, or lost
            return
        self.world.mail.append((self.worker_id, receiver_id, epoch, block.key, block.refreshed))
        self.world.tell(self.worker_id, KvSent(block.key, epoch))


@dataclass
class WorldWorker:
    """One process of a worker."""

    engine: Engine
    runner: RecordingRunner
    pages: PagePool
    wire: Wire
    inbox: deque[Command | KvNews] = field(default_factory=deque)
    refused: list[BlockEnd] = field(default_factory=list)


class World:
    """Everything, from the scheduler's rig to the pages of its workers."""

    def __init__(
        self, hybrid: Hybrid, script: FakeScript, *, overlap: bool, seed: int = 0, retries: int = 1000
    ) -> None:
        self.clock = ManualClock(100.0)
        self.rig = Rig(given=rules(retries=retries), hybrid=hybrid, ready=False)
        self.rig.fleet.awaits_lost = True
        self.random = random.Random(seed)
        self.broken: set[int] = set()
        self.mail: list[tuple[int, int, int, BlockKey, Refreshed]] = []
        self._hybrid, self._script, self._overlap = hybrid, script, overlap
        self._unheard: list[int] = []
        """Links that have broken, and one end has yet to notice."""
        self._seen = 0
        self.workers: dict[int, WorldWorker] = {}
        for worker_id in self.rig.fleet.workers:
            self.start(worker_id)

    # ---- what may happen ----

    def submit(self, submission: Submission) -> TrackedRequest:
        tracked = self.rig.submit(
            submission.prompt_token_ids,
            submission.gen_length,
            sampling=submission.sampling,
            request_seed=submission.request_seed,
            ignore_eos=submission.ignore_eos,
        )
        self._pass_on()
        return tracked

    def cancel(self, request_id: str) -> None:
        self.rig.cancel(request_id)
        self._pass_on()

    def step(self, worker_id: int) -> bool:
        """A worker takes what has come and makes one iteration; whether anything happened."""
        worker = self.workers[worker_id]
        had_mail = bool(worker.inbox)
        while worker.inbox:
            self._obey(worker, worker.inbox.popleft())
        report = worker.engine.step()
        worker.engine.take_events()
        worker.pages.check()
        ended = (*worker.refused, *(report.ended if report else ()))
        worker.refused.clear()
        if report or ended:
            self.rig.now_s = self.clock()
            self.rig.progress(
                worker_id,
                *ended,
                refreshed=report.refreshed if report else (),
                reserved=report.reserved if report else (),
                handed_over=report.handed_over if report else (),
            )
            self._pass_on()
        return had_mail or report is not None

    def deliver(self) -> bool:
        """The first message of some link arrives; False if there is none."""
        links = sorted({epoch for _, _, epoch, *_ in self.mail})
        if not links:
            return False
        epoch = self.random.choice(links)
        message = next(m for m in self.mail if m[2] == epoch)
        self.mail.remove(message)
        _, receiver_id, _, key, refreshed = message
        wire = self.workers[receiver_id].wire
        if wire.expected.pop(key, None) is not None:
            self.tell(receiver_id, KvArrived(key, refreshed, self.clock()))
        return True

    def break_link(self, sender_id: int, receiver_id: int, *, deaf_id: int | None = None) -> None:
        """Whatever was on its way between the two is lost; one of them may notice long after the other."""
        epoch = self.rig.fleet.links.of(sender_id, receiver_id)
        self._break(epoch, deaf_id)
        if deaf_id is not None:
            self._unheard.append(epoch)

    def kill(self, worker_id: int) -> None:
        """A worker dies in the middle of whatever it does, and is started again."""
        epochs = {epoch for sender, receiver, epoch, *_ in self.mail if worker_id in (sender, receiver)}
        for other_id, other in self.workers.items():
            epochs |= {e for sender, e, _ in other.wire.expected.values() if worker_id in (sender, other_id)}
            targets = [block.target for block in other.wire.outgoing.values() if block.target is not None]
            epochs |= {epoch for receiver, epoch in targets if worker_id in (receiver, other_id)}
        dead = self.workers.pop(worker_id)
        for epoch in sorted(epochs):
            self._break(epoch)
        dead.inbox.clear()
        self.rig.lose(worker_id)
        self.rig.restart(worker_id)
        self.start(worker_id)

    # ---- machinery ----

    def start(self, worker_id: int) -> None:
        runner = RecordingRunner(self._script, self.clock)
        wire = Wire(self, worker_id)
        runner.watch_layers(wire)
        pages = PagePool(self._hybrid.num_pages, PAGE_SIZE)
        limits = EngineLimits(
            max_batch_size=3,
            max_tokens_per_iteration=40,
            block_length=BLOCK,
            max_model_len=MAX_CANVAS,
            queue_policy="arrival_order",
            overlap=self._overlap,
            eos_token_ids=(EOS,),
            refresh_only=self.rig.fleet[worker_id].kind == PREFILL,
            max_prefill_tokens_per_batch=30,
        )
        engine = Engine(runner, pages, limits, worker_id=worker_id, clock=self.clock, transfer=wire)
        self.workers[worker_id] = WorldWorker(engine, runner, pages, wire)
        self.rig.ready(worker_id)
        self._pass_on()

    def tell(self, worker_id: int, news: KvNews) -> None:
        if worker_id in self.workers:
            self.workers[worker_id].inbox.append(news)

    def settle(self, limit: int = 20_000) -> None:
        """Let everything happen, in a random order, until nothing is left to happen."""
        for _ in range(limit):
            moves = self.random.sample(sorted(self.workers), len(self.workers))
            moved = [self.step(worker_id) for worker_id in moves if self.random.random() < 0.8]
            moved.append(self.random.random() < 0.7 and self.deliver())
            if any(moved) or any(self.step(worker_id) for worker_id in moves) or self.deliver():
                continue
            if not self._unheard:
                return
            self._break(self._unheard.pop())
        raise AssertionError(f"not at rest after {limit} rounds")

    def check(self) -> None:
        """What holds at every moment: nobody was given more pages than there are, and accounts add up."""
        for worker in self.rig.fleet.workers.values():
            assert 0 <= worker.num_free_pages <= self._hybrid.num_pages
            assignments = worker.assignments.values()
            assert worker.length_sum == sum(a.canvas_length for a in assignments)
            assert worker.outstanding_prefill_tokens == sum(a.prefill_tokens for a in assignments)
            assert worker.num_requests == len(worker.assignments)

    def check_rest(self) -> None:
        """What holds when nothing is left to happen."""
        self.check()
        assert self.rig.scheduler.num_in_server == 0
        assert not self.mail
        for worker_id, worker in self.workers.items():
            assert self.rig.fleet[worker_id].phase is WorkerPhase.READY
            assert worker.engine.is_idle
            assert worker.pages.num_free == self._hybrid.num_pages
            assert not worker.runner.slots
            assert (worker.wire.outgoing, worker.wire.expected, worker.wire.by_slot) == ({}, {}, {})
            assert not self.rig.fleet[worker_id].assignments

    def _break(self, epoch: int, deaf_id: int | None = None) -> None:
        self.broken.add(epoch)
        self.mail = [message for message in self.mail if message[2] != epoch]
        for worker_id, worker in self.workers.items():
            if worker_id == deaf_id:
                continue
            wire = worker.wire
            failed = [key for key, (_, own, _) in wire.expected.items() if own == epoch]
            for block in wire.outgoing.values():
                if block.target is not None and block.target[1] == epoch:
                    block.target = None
            for key in failed:
                wire.drop(key)
                self.tell(worker_id, KvFailed(key, "the link broke", epoch))

    def _pass_on(self) -> None:
        """Bring the scheduler's commands to the workers; SendBlock does not wait for an iteration."""
        commands = self.rig.commands[self._seen :]
        self._seen += len(commands)
        for worker_id, command in commands:
            worker = self.workers.get(worker_id)
            if worker is None:
                continue
            match command:
                case SendBlock(key, receiver_id, epoch):
                    worker.wire.send(key, receiver_id, epoch)
                case RunBlock(task):
                    if self.rig.fleet[worker_id].kind == PREFILL:
                        worker.wire.outgoing[task.key] = Outgoing(task.key)
                    worker.inbox.append(command)
                case _:
                    worker.inbox.append(command)

    def _obey(self, worker: WorldWorker, item: Command | KvNews) -> None:
        engine = worker.engine
        match item:
            case RunBlock(task):
                engine.submit(task)
            case ReserveBlock(task, sender_id, epoch):
                self._reserve(worker, task, sender_id, epoch)
            case CancelBlock(key):
                engine.cancel(key)
            case KvArrived(key, refreshed, at_s):
                engine.arrive(key, refreshed, at_s)
            case KvSent(key, epoch):
                engine.hand_over(HandedOver(key, epoch))
            case KvFailed():
                engine.transfer_failed(item)
            case _:
                raise AssertionError(f"{item} has no place here")

    def _reserve(self, worker: WorldWorker, task: BlockTask, sender_id: int, epoch: int) -> None:
        """The scheduler's account of a worker's pages is never more generous than the worker's own."""
        assert worker.pages.num_free >= worker.pages.pages_for(task.canvas_length), "there are too few pages"
        worker.engine.reserve(task, sender_id, epoch)
