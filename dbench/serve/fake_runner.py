"""A runner that follows a script instead of computing, for tests and for measuring the host's own cost.

Its tokens are a pure function of request seed, position and step. It holds the engine to the rules of the
seam: attached slots only, the right rows, and no page lent twice while a launched batch may touch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dbench.serve.runner import LayerWatcher, Phase, Span, SpanResult, StepResult, Ticket
from dbench.serve.sequence import BlockTask

NUM_TOKEN_IDS = 256
"""Scripted tokens are ids below this."""
NUM_LAYERS = 2
"""Of which watchers are told."""


class Clock(Protocol):
    """Tells the time in seconds and can wait."""

    def __call__(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class SystemClock:
    """The monotonic clock."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class ManualClock:
    """A clock that stands still unless somebody waits."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)


def fewest(task: BlockTask, step: int) -> int:
    """The rule's own least, which is all that the host may count on."""
    return task.sampling.fewest_per_step


def one_to_four(task: BlockTask, step: int) -> int:
    """What the rule is known to fix, else between 1 and 4 positions by request seed and step."""
    if task.sampling.rule.fixes_its_parameter:
        return task.sampling.fewest_per_step
    return 1 + _mix(task.request_seed, step, 1) % 4


@dataclass(frozen=True, slots=True)
class FakeScript:
    """What a FakeRunner does; the default decodes one position (or the quota) per step, at no time."""

    num_unmasked: Callable[[BlockTask, int], int] = fewest
    """(task, step) -> positions to fix, at least what the rule promises; capped by the masks left."""
    eos_token_ids: tuple[int, ...] = ()
    """Never drawn by chance."""
    eos_offsets: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """(request_id, block_index) -> place in the block whose token is the first of eos_token_ids."""
    non_finite: frozenset[tuple[str, int, int]] = frozenset()
    """(request_id, block_index, step) at which the logits are NaN."""
    failing_launches: frozenset[int] = frozenset()
    """Launches, counted from 0, that raise."""
    failing_collects: frozenset[int] = frozenset()
    """Launches whose collect raises."""
    poisonous: frozenset[str] = frozenset()
    """Requests that make the collect of every batch that holds a block of theirs raise."""
    lag_s: float = 0.0
    """Duration of a batch, beside its rows."""
    row_s: float = 0.0
    """Duration of one row."""


@dataclass(slots=True)
class _Slot:
    """What a device would hold of one block."""

    task: BlockTask
    pages: tuple[int, ...]
    to_fix: list[int]
    """Positions still masked, the next one to fix last."""
    num_steps: int = 0
    done: bool = False
    eos_positions: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launched:
    number: int
    slots: frozenset[int]
    result: StepResult


class FakeRunner:
    """A Runner whose batches run one after the other, each `lag_s` + rows x `row_s` long.

    With a ManualClock, collecting a batch moves the clock to its completion.
    """

    def __init__(self, script: FakeScript, *, page_size: int, clock: Clock) -> None:
        self._script = script
        self._page_size = page_size
        self._clock = clock
        self._slots: dict[int, _Slot] = {}
        self._lent: set[int] = set()  # pages of attached slots
        self._failed_slots: set[int] = set()
        self._launched: dict[Ticket, _Launched] = {}
        self._num_launches = 0
        self._watcher: LayerWatcher | None = None
        self._completed_s = float("-inf")

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        assert slot not in self._slots, f"slot {slot} is attached already"
        assert len(pages) * self._page_size >= task.canvas_length, f"{len(pages)} pages for {task.canvas_length} tokens"
        assert self._lent.isdisjoint(pages), f"pages {sorted(self._lent & set(pages))} belong to another slot"
        is_joined = bool(self._slots) and (task.alone or any(held.task.alone for held in self._slots.values()))
        assert not is_joined, f"{task.key} is beside other blocks, and one of them is alone"
        self._lent.update(pages)
        seed = task.request_seed
        order = sorted(range(task.block_start, task.block_end), key=lambda position: _mix(seed, position, 2))
        self._slots[slot] = _Slot(task, pages, order)
        if fixed is not None:
            assert 0 < len(fixed) < task.block_length, f"{task.key} was refreshed elsewhere, which fixed {fixed}"
            self._slots[slot] = _Slot(
                task,
                pages,
                [position for position in order if position not in fixed],
                num_steps=1,
                eos_positions=[position for position, token in fixed.items() if self._is_eos(token)],
            )

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        assert spans, "a batch needs a span"
        named = frozenset(span.slot for span in spans)
        assert len(named) == len(spans), "a slot has two spans in one batch"
        assert named.isdisjoint(self._failed_slots), f"slots {sorted(named & self._failed_slots)} failed, not detached"
        number = self._num_launches
        self._num_launches += 1
        if number in self._script.failing_launches:
            raise RuntimeError(f"scripted failure of launch {number}")
        launched_s = self._clock()
        results = tuple(self._run(span) for span in spans)
        refreshed = tuple(span.slot for span in spans if span.phase is Phase.REFRESH)
        if self._watcher is not None and refreshed:
            for layer in range(NUM_LAYERS):
                self._watcher.layer_written(refreshed, layer, _nothing_to_wait_for)
        rows = sum(span.num_rows for span in spans)
        start_s = max(launched_s, self._completed_s)
        self._completed_s = start_s + self._script.lag_s + rows * self._script.row_s
        ticket = Ticket(number)
        step_result = StepResult(results, launched_s, self._completed_s, sampling_s=0.0)
        self._launched[ticket] = _Launched(number, named, step_result)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        assert ticket == next(iter(self._launched), None), f"ticket {ticket} is not the oldest in flight"
        batch = self._launched.pop(ticket)
        self._clock.wait_until(batch.result.completed_s)
        poisonous = self._script.poisonous
        is_poisoned = poisonous and any(self._slots[slot].task.key.request_id in poisonous for slot in batch.slots)
        if batch.number in self._script.failing_collects or is_poisoned:
            self._failed_slots |= batch.slots
            raise RuntimeError(f"scripted failure of batch {batch.number}")
        return batch.result

    def detach(self, slot: int) -> None:
        assert slot in self._slots, f"slot {slot} is not attached"
        assert not any(slot in batch.slots for batch in self._launched.values()), f"slot {slot} is still in flight"
        self._lent.difference_update(self._slots.pop(slot).pages)
        self._failed_slots.discard(slot)

    def watch_layers(self, watcher: LayerWatcher) -> None:
        self._watcher = watcher

    def close(self) -> None:
        self._slots.clear()
        self._lent.clear()
        self._launched.clear()

    def _run(self, span: Span) -> SpanResult:
        held = self._slots.get(span.slot)
        assert held is not None, f"slot {span.slot} is not attached"
        if held.done:
            return SpanResult(span.slot, (), (), done=True, void=True, error="")
        task, step = held.task, held.num_steps
        _check_rows(span, task, step)
        held.num_steps += 1
        if (task.key.request_id, task.key.block_index, step) in self._script.non_finite:
            held.done = True
            return SpanResult(span.slot, (), (), done=True, void=False, error="non-finite logits (scripted)")
        count = self._script.num_unmasked(task, step)
        least = task.sampling.fewest_per_step
        assert count >= least, (
            f"the script fixes {count} positions, the rule at least {least}, in step {step} of {task.key}"
        )
        count = min(count, len(held.to_fix))
        positions = sorted(held.to_fix.pop() for _ in range(count))
        tokens = tuple(self._token(task, position, step) for position in positions)
        held.eos_positions += [p for p, token in zip(positions, tokens, strict=True) if self._is_eos(token)]
        held.done = not held.to_fix or (not task.ignore_eos and _is_cut(held))
        return SpanResult(span.slot, tuple(positions), tokens, held.done, void=False, error="")

    def _is_eos(self, token: int) -> bool:
        return token in self._script.eos_token_ids

    def _token(self, task: BlockTask, position: int, step: int) -> int:
        place = (task.key.request_id, task.key.block_index)
        if self._script.eos_offsets.get(place) == position - task.block_start:
            return self._script.eos_token_ids[0]
        token = _mix(task.request_seed, position, step + 3) % NUM_TOKEN_IDS
        while self._is_eos(token):
            token += 1
        return token


def _nothing_to_wait_for() -> None:
    """What is scripted is written at once."""


def _is_cut(held: _Slot) -> bool:
    """An end of text is fixed and no mask is left before it."""
    return bool(held.eos_positions) and min(held.to_fix) > min(held.eos_positions)


def _check_rows(span: Span, task: BlockTask, step: int) -> None:
    """A block's first step is its refresh over the canvas; the others are over the canvas or the block."""
    is_canvas = (span.start, span.num_rows, span.written_from) == (0, task.canvas_length, 0)
    if step == 0:
        assert span.phase is Phase.REFRESH, f"{task.key} starts without a refresh"
        assert is_canvas, f"{span} is not the canvas of {task.key}"
        return
    assert span.phase is Phase.DECODE, f"{task.key} is refreshed again"
    if not is_canvas:
        assert span.start + span.num_rows == task.block_end, f"{span} does not end with the block of {task.key}"
        assert task.block_start - span.start in (0, 1), f"{span} does not start at the block of {task.key}"
        assert span.written_from == task.block_start, f"{span} writes outside of the block of {task.key}"


def _mix(seed: int, place: int, tag: int) -> int:
    """A well-scattered 32-bit number from three integers."""
    x = (seed * 0x9E3779B97F4A7C15 + place * 0xC2B2AE3D27D4EB4F + tag * 0x165667B19E3779F9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 31)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 29)) >> 32
