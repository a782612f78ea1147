"""A scheduler with workers made of nothing but their messages, and a clock that the test moves."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from dbench.events import Event
from dbench.options import COLOCATED
from dbench.serve.finished import Retention
from dbench.serve.fleet import Fleet, FleetRules
from dbench.serve.placement import ColocatedPlacer, HybridPlacer, HybridRules, Placer
from dbench.serve.routes import DECODE_ROUTES, HYBRID_PREFILL_ROUTES, PREFILL_ROUTES, RouteState, read_fast_pairs
from dbench.serve.scheduler import Scheduler
from dbench.serve.scheduler_records import SchedulerRules
from dbench.serve.sequence import (
    BlockEnd,
    BlockKey,
    BlockOutcome,
    BlockStep,
    BlockTask,
    BlockTimes,
    Fault,
    HandedOver,
    Request,
    SamplingParameters,
)
from dbench.serve.tracking import RequestShape, TrackedRequest
from dbench.serve.validation import RequestLimits
from dbench.serve.wire import Submission
from dbench.serve.wire_link import Command, EngineProgress, Hello, Ready, RunBlock

E = TypeVar("E", bound=Event)

BLOCK = 4
MASK_ID = 90
TIMEOUT_S = 30.0
STARTUP_TIMEOUT_S = 60.0
LIMITS = RequestLimits(
    block_length=BLOCK, max_gen_len=None, max_model_len=64, vocabulary_size=100, kv_max_pages=32, kv_page_size=4
)


def rules(
    limits: RequestLimits = LIMITS, *, retries: int = 2, queued: int = 100, kept: Retention | None = None
) -> SchedulerRules:
    return SchedulerRules(limits, MASK_ID, retries, queued, TIMEOUT_S, kept or Retention(60.0, 100))


@dataclass(frozen=True)
class Hybrid:
    """A fleet of two kinds of workers, the prefill workers first, and how its blocks are placed."""

    num_prefill: int = 1
    num_colocated: int = 2
    num_remote_prefill: int = 0
    """Prefill workers that are expected from elsewhere."""
    num_pages: int = 32
    overflow: bool = True
    overload_threshold: int = 40
    decode_policy: str = "max_free_memory"
    prefill_policy: str = "least_outstanding_prefill_tokens"
    fast_pairs: str = "0-1"

    def fleet(self) -> Fleet:
        return Fleet(
            FleetRules(
                ["cpu"] * (self.num_prefill + self.num_colocated),
                num_prefill=self.num_prefill,
                num_remote_prefill=self.num_remote_prefill,
                refreshes_anywhere=self.overflow,
            )
        )

    def placer(self, fleet: Fleet) -> HybridPlacer:
        rules = HybridRules(
            HYBRID_PREFILL_ROUTES[self.prefill_policy],
            RouteState(random.Random(0)),
            DECODE_ROUTES[self.decode_policy],
            RouteState(random.Random(1)),
            overflow=self.overflow,
            overload_threshold=self.overload_threshold,
            fast_pairs=read_fast_pairs(self.fast_pairs),
        )
        return HybridPlacer(fleet, rules)


class Rig:
    """Drives a scheduler; keeps every command and event it gave."""

    def __init__(
        self,
        num_workers: int = 2,
        given: SchedulerRules | None = None,
        policy: str = "round_robin",
        *,
        ready: bool = True,
        num_remote: int = 0,
        sticky: bool = False,
        hybrid: Hybrid | None = None,
    ) -> None:
        ids = (f"r{number}" for number in count())
        if hybrid is None:
            self.fleet = Fleet(FleetRules(["cpu"] * num_workers, num_remote, STARTUP_TIMEOUT_S))
            state = RouteState(random.Random(0))
            placer: Placer = ColocatedPlacer(self.fleet, PREFILL_ROUTES[policy], state, sticky=sticky)
        else:
            num_workers = hybrid.num_prefill + hybrid.num_colocated
            self.fleet = hybrid.fleet()
            placer = hybrid.placer(self.fleet)
        self.num_pages = 32 if hybrid is None else hybrid.num_pages
        self.scheduler = Scheduler(given or rules(), self.fleet, placer, lambda: next(ids))
        self.now_s = 100.0
        self.commands: list[tuple[int, Command]] = []
        self.events: list[Event] = []
        self.changed: list[str] = []
        if ready:
            for worker_id in range(num_workers):
                self.ready(worker_id)

    def take(self) -> None:
        output = self.scheduler.take_output()
        self.commands += output.commands
        self.events += output.events
        self.changed += output.changed

    def ready(self, worker_id: int) -> None:
        hello = Hello("key", worker_id, self.fleet[worker_id].device, 1000 + worker_id)
        self.scheduler.worker_ready(hello, Ready(self.num_pages, 4, 64), self.now_s)
        self.take()

    def submit(self, prompt: tuple[int, ...] = (1, 2, 3), gen_length: int = BLOCK, **given: Any) -> TrackedRequest:
        tracked = self.scheduler.submit(Submission(prompt, gen_length, **given), self.now_s)
        self.take()
        return tracked

    def cancel(self, request_id: str) -> str:
        status = self.scheduler.cancel(request_id, self.now_s)
        self.take()
        return status

    def join(self, instance: str, kind: str = COLOCATED) -> int:
        """A remote worker dials, and is ready at once; returns its id."""
        worker = self.fleet.join(Hello("key", None, "cpu", 7, host=f"host of {instance}", instance=instance, kind=kind))
        self.ready(worker.worker_id)
        return worker.worker_id

    def leave(self, worker_id: int) -> None:
        """A worker asks to be drained."""
        self.scheduler.worker_leaves(worker_id, self.now_s)
        self.take()

    def states(self) -> list[str]:
        return [worker.state for worker in self.fleet.statuses()]

    def lose(self, worker_id: int, reason: str = "its stream ended") -> None:
        self.scheduler.worker_gone(worker_id, reason, self.now_s)
        self.take()

    def restart(self, worker_id: int) -> None:
        """An awaited worker's new process starts."""
        self.scheduler.worker_starts(worker_id)

    def give_up(self, worker_id: int, reason: str = "could not be started again") -> None:
        self.scheduler.give_up(worker_id, reason, self.now_s)
        self.take()

    def look(self, passed_s: float) -> None:
        """Let time pass, and lose the workers that hang or stay away."""
        self.now_s += passed_s
        for worker_id, reason in self.scheduler.find_hanging_workers(self.now_s):
            self.lose(worker_id, reason)
        for worker_id, reason in self.fleet.find_absent():
            self.give_up(worker_id, reason)

    def progress(
        self,
        worker_id: int,
        *ended: BlockEnd,
        refreshed: tuple[BlockKey, ...] = (),
        lines: tuple[str, ...] = (),
        worker_now_s: float | None = None,
        iteration_age_s: float | None = None,
        reserved: tuple[BlockKey, ...] = (),
        handed_over: tuple[BlockKey | HandedOver, ...] = (),
    ) -> None:
        """Blocks that are handed over by their key, or failed over no link, did so over the worker's present one."""
        worker_now_s = self.now_s if worker_now_s is None else worker_now_s
        given = self.fleet[worker_id].assignments
        sent = tuple(
            key if isinstance(key, HandedOver) else HandedOver(key, given[key].epoch if key in given else 0)
            for key in handed_over
        )
        ends = tuple(
            replace(end, link_epoch=given[end.key].epoch)
            if end.fault.ends_link and not end.link_epoch and end.key in given
            else end
            for end in ended
        )
        message = EngineProgress(
            worker_now_s, 1, refreshed, ends, lines, iteration_age_s, reserved=reserved, handed_over=sent
        )
        self.scheduler.progress(worker_id, message, self.now_s)
        self.take()

    def tasks(self) -> Iterator[tuple[int, BlockTask]]:
        """Every block sent so far, with its worker."""
        return ((worker_id, command.task) for worker_id, command in self.commands if isinstance(command, RunBlock))

    def last_task(self) -> tuple[int, BlockTask]:
        return list(self.tasks())[-1]

    def finish_block(self, first_id: int = 10) -> None:
        """The worker of the last block sent answers that it is done."""
        self.answer(*self.last_task(), first_id=first_id)

    def answer(self, worker_id: int, task: BlockTask, *, first_id: int = 10) -> None:
        """The worker says that a block is done."""
        self.progress(worker_id, done(task, tuple(range(first_id, first_id + task.block_length))))

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def done(task: BlockTask, token_ids: tuple[int, ...], *, found_eos: bool = False) -> BlockEnd:
    """Two steps, a second apart."""
    steps = (BlockStep(2.0, 1), BlockStep(3.0, len(token_ids) - 1))
    times = BlockTimes(0.5, 1.0, 2.0, 2.0, 3.0)
    return BlockEnd(task.key, BlockOutcome.DONE, token_ids, found_eos, "", times, steps)


def failed(task: BlockTask, error: str = "batch failed", fault: Fault = Fault.BATCH) -> BlockEnd:
    return BlockEnd.without_steps(task.key, BlockOutcome.FAILED, error, fault)


def cancelled(task: BlockTask) -> BlockEnd:
    return BlockEnd.without_steps(task.key, BlockOutcome.CANCELLED)


def make_tracked(num_prompt: int, num_masks: int, sampling: SamplingParameters) -> TrackedRequest:
    """A request as it came in, with one block of 32 per 32 masks."""
    request = Request("r", (1,) * num_prompt, num_masks, sampling, 0, False, 0.0)
    shape = RequestShape(num_prompt, num_masks, 32, num_masks // 32)
    return TrackedRequest(request, shape, 1, array("i", request.prompt_token_ids), ready_s=0.0)
