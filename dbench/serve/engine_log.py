"""The events of an engine: one per batch, and the worker's state at every change."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from dbench.events import BatchExecuted, Event, WorkerState
from dbench.serve.engine_state import Interval, Plan
from dbench.serve.runner import Operation, Phase, StepResult


@dataclass(frozen=True, slots=True)
class Depths:
    """What a WorkerState tells beside when and where."""

    state: str
    waiting: int
    active: int
    outstanding_prefill_tokens: int
    decode_length_sum: int
    pages_used: int
    deficit_tokens: int

    def with_waiting(self, canvas_length: int) -> Depths:
        """The same with one more block that waits."""
        return replace(
            self,
            state="queued" if self.state == "idle" else self.state,
            waiting=self.waiting + 1,
            outstanding_prefill_tokens=self.outstanding_prefill_tokens + canvas_length,
        )


class Moment(NamedTuple):
    """From `at_s` on it was so."""

    at_s: float
    depths: Depths


_NOTHING_YET = Moment(float("-inf"), Depths("idle", 0, 0, 0, 0, 0, 0))
_BY_TIME = attrgetter("at_s")


@dataclass(slots=True)
class EngineLog:
    """Collects events until they are taken."""

    worker_id: int
    pages_total: int
    _batches: list[Event] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)  # of changes, in order of time
    _taken: Moment = _NOTHING_YET  # the last one that was taken

    def take(self) -> list[Event]:
        """The events since the last call, in order of time; mutates the log."""
        events = [*self._batches, *(self._worker_state(moment) for moment in self._moments)]
        if self._moments:
            self._taken = self._moments[-1]
        self._batches, self._moments = [], []
        return sorted(events, key=_BY_TIME)

    def state(self, at_s: float, depths: Depths) -> None:
        """Record the state if it differs from the last one."""
        last = self._moments[-1] if self._moments else self._taken
        if depths != last.depths or last is _NOTHING_YET:
            self._moments.append(Moment(at_s, depths))

    def arrival(self, at_s: float, canvas_length: int) -> None:
        """A block has been waiting since `at_s`: so say that moment and those after it.

        What was taken before cannot be changed any more; then it waits from there on.
        """
        at_s = max(at_s, self._taken.at_s)
        place = bisect_right(self._moments, at_s, key=_BY_TIME)
        before = self._moments[place - 1] if place else self._taken
        since = [Moment(at_s, before.depths), *self._moments[place:]]
        self._moments[place:] = [Moment(at, depths.with_waiting(canvas_length)) for at, depths in since]

    def _worker_state(self, moment: Moment) -> WorkerState:
        depths = moment.depths
        return WorkerState(
            at_s=moment.at_s,
            source=self._source,
            worker_id=self.worker_id,
            state=depths.state,
            queue_depth_waiting=depths.waiting,
            queue_depth_active=depths.active,
            outstanding_prefill_tokens=depths.outstanding_prefill_tokens,
            decode_length_sum=depths.decode_length_sum,
            pages_used=depths.pages_used,
            pages_total=self.pages_total,
            deficit_tokens=depths.deficit_tokens,
        )

    def batch(self, plan: Plan, result: StepResult, interval: Interval, decoding_canvases: list[int]) -> None:
        """Record a finished batch; `decoding_canvases` are the canvas lengths of its decode spans."""
        refresh_rows = sum(span.num_rows for span in plan.spans if span.phase is Phase.REFRESH)
        all_rows = sum(span.num_rows for span in plan.spans)
        operations = result.operations or {}
        void_rows = sum(span.num_rows for span, got in zip(plan.spans, result.spans, strict=True) if got.void)
        self._batches.append(
            BatchExecuted(
                at_s=interval.end_s,
                source=self._source,
                worker_id=self.worker_id,
                start_s=interval.start_s,
                batch_size=len(plan.spans),
                batch_prompt_len=refresh_rows,
                batch_gen_len=all_rows - refresh_rows,
                batch_num_void_tokens=void_rows,
                batch_num_unmasked_tokens=sum(len(got.positions) for got in result.spans),
                batch_decode_length_std=_population_std(decoding_canvases),
                batch_sampling_time=result.sampling_s,
                batch_op_attn_time=operations.get(Operation.ATTENTION),
                batch_op_mlp_time=operations.get(Operation.MLP),
                batch_op_qkv_time=operations.get(Operation.QKV),
            )
        )

    @property
    def _source(self) -> str:
        return f"worker-{self.worker_id}"


def _population_std(values: list[int]) -> float | None:
    """None below two values."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
