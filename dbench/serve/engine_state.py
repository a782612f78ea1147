"""What an engine goes by, what it reports, and what it knows of the blocks it holds: waiting, running, planned.

Only `Engine.launched`, `Engine.advance` and what they call change a Sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dbench.serve.policy import QueueKey
from dbench.serve.runner import Span, SpanResult, Ticket
from dbench.serve.sequence import (
    BlockEnd,
    BlockKey,
    BlockOutcome,
    BlockStep,
    BlockTask,
    BlockTimes,
    Fault,
    HandedOver,
    Refreshed,
    RefreshTimes,
)
from dbench.serve.transit import Arrived


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine may do at a time, and how it chooses."""

    max_batch_size: int
    """Running blocks, and the number of the runner's slots."""
    max_tokens_per_iteration: int
    block_length: int
    max_model_len: int
    """Longest canvas."""
    queue_policy: str
    """A key of QUEUE_ORDERS."""
    overlap: bool
    eos_token_ids: tuple[int, ...]
    cache_mode: str = "exact"
    """A key of SPANS."""
    logit_shift: int = 0
    """1 for models whose logits at a row predict the next position."""
    refresh_only: bool = False
    """Blocks leave after their refresh, for a worker that decodes them; no deficit is saved up."""
    max_prefill_tokens_per_batch: int = 0
    """In place of max_tokens_per_iteration where only refreshes run."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one iteration of the driver brought to an end."""

    refreshed: tuple[BlockKey, ...]
    """Blocks whose refresh has landed and left masks to decode, or whose refresh came from elsewhere and that have a
    slot now.
    """
    ended: tuple[BlockEnd, ...]
    reserved: tuple[BlockKey, ...] = ()
    """Blocks for which pages were taken."""
    handed_over: tuple[HandedOver, ...] = ()
    """Blocks whose KV has been sent, and whose pages are free."""

    @property
    def is_empty(self) -> bool:
        return not (self.refreshed or self.ended or self.reserved or self.handed_over)


@dataclass(frozen=True, slots=True)
class Queued:
    """A block whose refresh waits."""

    order: QueueKey
    task: BlockTask
    received_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration before it is launched."""

    spans: tuple[Span, ...]
    """Decode spans of running blocks and of `resumed`, then the refreshes of `admitted`."""
    admitted: tuple[Queued, ...]
    """The front of the queue, in its order."""
    resumed: tuple[Arrived, ...]
    """The front of the blocks that were refreshed elsewhere; their first decode spans are the last of the decodes."""
    deficit: int
    """For the next iteration."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched batch that has not been collected."""

    plan: Plan
    ticket: Ticket


class Interval(NamedTuple):
    """A batch's time on the device: from max(its launch, the previous completion) to its completion."""

    start_s: float
    end_s: float


class Landed(NamedTuple):
    """A step whose result has arrived."""

    end_s: float
    positions: tuple[int, ...]


@dataclass(slots=True)
class Sequence:
    """A running block: admitted, and not yet reported as ended."""

    task: BlockTask
    slot: int
    pages: tuple[int, ...]
    received_s: float
    decode_span: Span
    attached: bool = False
    """The runner knows the slot."""
    in_flight: int = 0
    """Spans launched and not yet collected."""
    outcome: BlockOutcome | None = None
    """Set once; the block leaves when nothing of it is in flight."""
    error: str = ""
    fault: Fault = Fault.NONE
    fixed: dict[int, int] = field(default_factory=dict)
    """Canvas position -> token id, of landed steps."""
    steps: list[Landed] = field(default_factory=list)
    refresh: Interval | None = None
    decode_start_s: float | None = None
    last_span_end_s: float = 0.0
    """Completion of the last landed span, a void one too: the block cannot be reported before."""
    refreshed_elsewhere: RefreshTimes | None = None

    @staticmethod
    def resumed(block: Arrived, slot: int, decode_span: Span) -> Sequence:
        """A block that was refreshed elsewhere: its first step has landed when its KV had arrived."""
        at_s, refreshed = block.arrived_s, block.refreshed
        return Sequence(
            block.task,
            slot,
            block.pages,
            at_s,
            decode_span,
            fixed=dict(zip(refreshed.positions, refreshed.token_ids, strict=True)),
            steps=[Landed(at_s, refreshed.positions)],
            refresh=Interval(at_s, at_s),
            last_span_end_s=at_s,
            refreshed_elsewhere=refreshed.times,
        )

    def handed_over_by(self, worker_id: int) -> Refreshed:
        """What its refresh has fixed, for the worker that goes on; the transfer fills in when it began."""
        assert self.refresh is not None, f"{self.task.key} has not been refreshed"
        positions = tuple(sorted(self.fixed))
        times = RefreshTimes(worker_id, self.received_s, self.refresh.start_s, self.refresh.end_s, self.refresh.end_s)
        return Refreshed(positions, tuple(self.fixed[position] for position in positions), times)

    @property
    def masks_left(self) -> int:
        """Masks of the block, as far as steps have landed."""
        return self.task.block_length - len(self.fixed)

    @property
    def ends_in_flight(self) -> bool:
        """The steps in flight are sure to fix every mask, or to find the block ended before."""
        return self.masks_left <= self.in_flight * self.task.sampling.fewest_per_step

    @property
    def wants_step(self) -> bool:
        """Another decode step may be planned, as far as the host knows."""
        return self.outcome is None and not self.ends_in_flight

    def fail(self, step: int, reason: str, fault: Fault) -> None:
        """Ends the block as FAILED, unless it has ended already."""
        if self.outcome is None:
            self.outcome = BlockOutcome.FAILED
            self.fault = fault
            self.error = f"block {self.task.key.block_index}, step {step}: {reason}"

    def end_early(self, end: BlockEnd) -> None:
        """Ends the block as this report says, unless it has ended already."""
        if self.outcome is None:
            self.outcome, self.error, self.fault = end.outcome, end.error, end.fault

    def land(self, got: SpanResult, interval: Interval) -> None:
        """Take in one step that was not void. What follows a failed step is dropped."""
        if self.outcome is BlockOutcome.FAILED:
            return
        assert self.outcome is not BlockOutcome.DONE, f"{self.task.key} stepped on after its end"
        if self.refresh is None:
            self.refresh = interval
        elif self.decode_start_s is None:
            self.decode_start_s = interval.start_s
        self.steps.append(Landed(interval.end_s, got.positions))
        assert self.fixed.keys().isdisjoint(got.positions), f"{self.task.key} fixed a position twice: {got.positions}"
        self.fixed.update(zip(got.positions, got.token_ids, strict=True))
        if got.error:
            self.fail(len(self.steps) - 1, got.error, Fault.OWN)
            return
        assert got.positions, f"{self.task.key} fixed nothing in step {len(self.steps) - 1}"
        assert got.done or self.masks_left > 0, f"{self.task.key} has no mask left and goes on"
        if got.done and self.outcome is None:
            self.outcome = BlockOutcome.DONE

    def block_end(self, eos_token_ids: frozenset[int]) -> BlockEnd:
        """The report of a block that has its outcome; mutates nothing."""
        token_ids: tuple[int, ...] = ()
        found_eos = False
        if self.outcome is BlockOutcome.DONE:
            token_ids, found_eos = self._returned_ids(eos_token_ids)
        assert self.outcome is not None, f"{self.task.key} has not ended"
        returned_end = self.task.block_start + len(token_ids)
        return BlockEnd(
            key=self.task.key,
            outcome=self.outcome,
            token_ids=token_ids,
            found_eos=found_eos,
            error=self.error,
            times=self._times(),
            steps=tuple(BlockStep(s.end_s, sum(p < returned_end for p in s.positions)) for s in self.steps),
            fault=self.fault,
            refreshed_elsewhere=self.refreshed_elsewhere,
        )

    def _returned_ids(self, eos_token_ids: frozenset[int]) -> tuple[tuple[int, ...], bool]:
        """The block's ids up to its first end-of-text id (that included), and whether there is one."""
        ids: list[int] = []
        for position in range(self.task.block_start, self.task.block_end):
            assert position in self.fixed, f"{self.task.key} ended with a mask at position {position}"
            ids.append(self.fixed[position])
            if not self.task.ignore_eos and ids[-1] in eos_token_ids:
                return tuple(ids), True
        return tuple(ids), False

    def _times(self) -> BlockTimes | None:
        if self.refresh is None:
            return None
        decode_start_s = self.refresh.end_s if self.decode_start_s is None else self.decode_start_s
        return BlockTimes(
            received_s=self.received_s,
            refresh_start_s=self.refresh.start_s,
            refresh_end_s=self.refresh.end_s,
            decode_start_s=decode_start_s,
            end_s=self.last_span_end_s,
        )
