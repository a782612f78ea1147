"""The events of an engine: one per batch, and the worker's state at every change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dbench.events import BatchExecuted, Event, WorkerState
from dbench.serve.engine_state import Interval, Plan
from dbench.serve.runner import Phase, StepResult


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


@dataclass(slots=True)
class EngineLog:
    """Collects events until they are taken."""

    worker_id: int
    pages_total: int
    _events: list[Event] = field(default_factory=list)
    _last: Depths | None = None

    def take(self) -> list[Event]:
        """The events since the last call; mutates the log."""
        events, self._events = self._events, []
        return events

    def state(self, at_s: float, depths: Depths) -> None:
        """Record the state if it differs from the last one."""
        if depths == self._last:
            return
        self._last = depths
        self._events.append(
            WorkerState(
                at_s=at_s,
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
        )

    def batch(self, plan: Plan, result: StepResult, interval: Interval, decoding_canvases: list[int]) -> None:
        """Record a finished batch; `decoding_canvases` are the canvas lengths of its decode spans."""
        refresh_rows = sum(span.num_rows for span in plan.spans if span.phase is Phase.REFRESH)
        all_rows = sum(span.num_rows for span in plan.spans)
        void_rows = sum(span.num_rows for span, got in zip(plan.spans, result.spans, strict=True) if got.void)
        self._events.append(
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
