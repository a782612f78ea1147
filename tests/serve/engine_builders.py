"""Small real engines over a scripted runner, and the blocks they decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dbench.events import BatchExecuted, Event, WorkerState
from dbench.serve.engine import Engine
from dbench.serve.engine_state import EngineLimits
from dbench.serve.fake_runner import FakeRunner, FakeScript, ManualClock
from dbench.serve.pages import PagePool
from dbench.serve.runner import Span, StepResult, Ticket
from dbench.serve.sequence import BlockEnd, BlockKey, BlockTask, SamplingParameters

PAGE_SIZE = 4
EOS = 300
"""Outside of the ids that a FakeRunner draws."""

QUOTA_ONE = SamplingParameters("conf_quota", fixed_unmask_quota=1)
RANDOM = SamplingParameters("random")


def quota(count: int) -> SamplingParameters:
    return SamplingParameters("conf_quota", fixed_unmask_quota=count)


def make_task(name: str = "a", *, block_index: int = 0, prompt: int = 8, masks: int = 4, **changes: Any) -> BlockTask:
    """A first block of 4, one position per step; `prompt` and `masks` are numbers of tokens."""
    task = BlockTask(
        key=BlockKey(name, block_index, 0),
        token_ids=tuple(range(prompt)),
        num_masks=masks,
        block_length=4,
        sampling=QUOTA_ONE,
        request_seed=sum(name.encode()),
        ignore_eos=True,
        arrival_s=0.0,
        num_remaining_blocks=1,
    )
    return replace(task, **changes)


@dataclass
class RecordingRunner(FakeRunner):
    """A FakeRunner that keeps the order of the calls and the spans of every launch."""

    script: FakeScript
    clock: ManualClock
    calls: list[str] = field(default_factory=list)
    launches: list[tuple[Span, ...]] = field(default_factory=list)
    attached: list[BlockTask] = field(default_factory=list)
    slots: dict[int, BlockTask] = field(default_factory=dict)
    """Attached and not detached."""

    def __post_init__(self) -> None:
        super().__init__(self.script, page_size=PAGE_SIZE, clock=self.clock)

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        self.attached.append(task)
        super().attach(slot, task, pages, fixed)
        self.slots[slot] = task

    def detach(self, slot: int) -> None:
        super().detach(slot)
        del self.slots[slot]

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        self.calls.append(f"launch {len(self.launches)}")
        self.launches.append(spans)
        return super().launch(spans)

    def collect(self, ticket: Ticket) -> StepResult:
        self.calls.append(f"collect {ticket}")
        return super().collect(ticket)


@dataclass
class Rig:
    """An engine and everything around it."""

    engine: Engine
    runner: RecordingRunner
    pages: PagePool
    clock: ManualClock
    events: list[Event] = field(default_factory=list)
    ends: dict[BlockKey, BlockEnd] = field(default_factory=dict)
    refreshed: list[BlockKey] = field(default_factory=list)

    def step(self) -> bool:
        """One step; False when the engine is idle. Every block may end once only."""
        report = self.engine.step()
        self.events += self.engine.take_events()
        for end in report.ended if report else ():
            assert end.key not in self.ends, f"{end.key} ended twice"
            self.ends[end.key] = end
        self.refreshed += report.refreshed if report else ()
        return report is not None

    def drain(self, limit: int = 10_000) -> dict[BlockKey, BlockEnd]:
        """Step until idle."""
        for _ in range(limit):
            if not self.step():
                return self.ends
        raise AssertionError(f"not idle after {limit} steps")

    def run(self, tasks: Iterable[BlockTask]) -> list[BlockEnd]:
        """Submit all and return their ends in the same order."""
        tasks = list(tasks)
        for task in tasks:
            self.engine.submit(task)
        self.drain()
        return [self.ends[task.key] for task in tasks]

    @property
    def batches(self) -> list[BatchExecuted]:
        return [event for event in self.events if isinstance(event, BatchExecuted)]

    @property
    def states(self) -> list[WorkerState]:
        return [event for event in self.events if isinstance(event, WorkerState)]


def make_rig(script: FakeScript | None = None, *, num_pages: int = 64, **changes: Any) -> Rig:
    """Plain driver, 4 slots, 64 tokens per iteration, unless changed; batches last 1 s unless scripted."""
    limits = EngineLimits(
        max_batch_size=4,
        max_tokens_per_iteration=64,
        block_length=4,
        max_model_len=256,
        queue_policy="arrival_order",
        overlap=False,
        eos_token_ids=(EOS,),
    )
    clock = ManualClock()
    runner = RecordingRunner(script or FakeScript(lag_s=1.0), clock)
    pages = PagePool(num_pages, PAGE_SIZE)
    return Rig(Engine(runner, pages, replace(limits, **changes), worker_id=3, clock=clock), runner, pages, clock)
