"""The engine of one worker: what runs next, and what came of it.

An iteration is `plan` (pure), `launched` (marks spans in flight), the runner's launch and collect (the
only calls that reach the device) and `advance` (lands the results). The plain driver makes them back to
back; the overlapping one launches an iteration before it lands the one before, so that the device never
waits for the host. One thread calls everything.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import chain
from operator import attrgetter

from dbench.errors import DeviceLost, RequestError
from dbench.events import Event
from dbench.serve.engine_log import Depths, EngineLog
from dbench.serve.engine_state import EngineLimits, InFlight, Interval, Plan, Queued, Sequence, StepReport
from dbench.serve.pages import PagePool
from dbench.serve.policy import QUEUE_ORDERS, SPANS, Room, TokenBudget, admit, choose, num_that_may_join
from dbench.serve.runner import Phase, Runner, Span, StepResult
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, BlockTask, Fault, HandedOver, Refreshed
from dbench.serve.transit import KvFailed, KvTransfer, Transit

logger = logging.getLogger(__name__)

_BY_ORDER = attrgetter("order")


class Engine:
    """Holds the blocks of one worker, from `submit` to their BlockEnd in a StepReport."""

    def __init__(
        self,
        runner: Runner,
        pages: PagePool,
        limits: EngineLimits,
        *,
        worker_id: int,
        clock: Callable[[], float] = time.monotonic,
        transfer: KvTransfer | None = None,
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._limits = limits
        self._clock = clock
        self._order = choose("prefill_queue_policy", QUEUE_ORDERS, limits.queue_policy)
        self._span_rules = choose("cache mode", SPANS, limits.cache_mode)
        self._eos_token_ids = frozenset(limits.eos_token_ids)
        self._worker_id = worker_id
        self._log = EngineLog(worker_id, pages.num_pages)
        self._transit = Transit(pages, transfer)
        self._waiting: list[Queued] = []  # sorted by order
        self._queued: dict[BlockKey, Queued] = {}
        self._running: dict[int, Sequence] = {}  # by slot, in order of admission
        self._running_slots: dict[BlockKey, int] = {}
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._in_flight: InFlight | None = None
        self._deficit = 0
        self._outstanding_tokens = 0
        self._running_length_sum = 0
        self._last_completed_s = float("-inf")
        self._refreshed: list[BlockKey] = []
        self._ended: list[BlockEnd] = []
        self._reserved: list[BlockKey] = []
        self._handed_over: list[HandedOver] = []

    # ---- what the worker calls ------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs, is in flight, in transit or still to be reported."""
        holds_blocks = self._waiting or self._running or self._in_flight or not self._transit.is_empty
        return not holds_blocks and self._report().is_empty

    @property
    def waiting(self) -> tuple[BlockKey, ...]:
        """The blocks whose refresh has not begun."""
        return tuple(self._queued)

    @property
    def held(self) -> tuple[BlockKey, ...]:
        """All blocks that have not ended."""
        return (*self._queued, *self._running_slots, *self._transit.keys)

    def submit(self, task: BlockTask, received_s: float | None = None) -> None:
        """Queue a block that came at `received_s` of the clock, now by default: it has waited since.

        Raises RequestError for a canvas that can never fit.
        """
        assert task.key not in self._queued, f"{task.key} is queued already"
        assert task.key not in self._running_slots, f"{task.key} runs already"
        self._refuse_what_never_fits(task)
        queued = Queued(self._order(task), task, self._clock() if received_s is None else received_s)
        insort(self._waiting, queued, key=_BY_ORDER)
        self._queued[task.key] = queued
        self._outstanding_tokens += task.canvas_length
        self._log.arrival(queued.received_s, task.canvas_length)

    def cancel(self, key: BlockKey) -> None:
        """End a block early; a later StepReport holds its BlockEnd. Unknown keys are ignored.

        A block that had already ended by itself, but for a span in flight, is reported as it ended.
        """
        self._end_early(BlockEnd.without_steps(key, BlockOutcome.CANCELLED))

    def reserve(self, task: BlockTask, sender_id: int, epoch: int) -> None:
        """Take pages for a block that another worker refreshes; a later StepReport says so, or holds its end."""
        assert task.key not in self.held, f"{task.key} is here already"
        if self._transit.reserve(task, self._order(task), sender_id, epoch):
            self._reserved.append(task.key)
        else:
            reason = f"{self._pages.num_free} KV pages are free, a canvas of {task.canvas_length} tokens needs more"
            self._ended.append(BlockEnd.without_steps(task.key, BlockOutcome.FAILED, reason, Fault.WORKER))
        self._note_state()

    def arrive(self, key: BlockKey, refreshed: Refreshed, at_s: float) -> None:
        """The KV of a reserved block is all there since `at_s`; unknown keys are ignored, here and below."""
        self._transit.arrive(key, refreshed, at_s)

    def hand_over(self, sent: HandedOver) -> None:
        """The KV of a refreshed block has been sent."""
        if self._transit.sent(sent.key):
            self._handed_over.append(sent)
        self._note_state()

    def transfer_failed(self, failed: KvFailed) -> None:
        """The KV of a block cannot be sent, even if its refresh has yet to end, or does not come."""
        error = f"block {failed.key.block_index}: {failed.reason}"
        fault = Fault.LINK if failed.was_broken else Fault.TRANSFER
        self._end_early(BlockEnd.without_steps(failed.key, BlockOutcome.FAILED, error, fault, failed.epoch))

    def step(self) -> StepReport | None:
        """One iteration of the driver; None when idle, after the pages were found complete, and when nothing can go on
        before a command or a transfer.

        Raises AssertionError when the engine has broken one of its own rules.
        """
        if self.is_idle:
            self._check_pages()
            self._note_state()
            return None
        has_run = self._step_overlapping() if self._limits.overlap else self._step_plain()
        report = self._report()
        for reported in (self._refreshed, self._ended, self._reserved, self._handed_over):
            reported.clear()
        return report if has_run or not report.is_empty else None

    def take_events(self) -> list[Event]:
        """BatchExecuted and WorkerState since the last call."""
        return self._log.take()

    # ---- the two drivers ------------------------------------------------------------------------

    def _step_plain(self) -> bool:
        """Whether a batch has run."""
        batch = self._launch(self.plan())
        if batch is not None:
            self._land(batch)
        return batch is not None

    def _step_overlapping(self) -> bool:
        """Whether a batch has run, or does."""
        before = self._in_flight
        self._in_flight = self._launch(self.plan())
        if before is not None:
            self._land(before)
        return before is not None or self._in_flight is not None

    def _launch(self, plan: Plan) -> InFlight | None:
        """Start a batch; None if there is nothing to start or the runner refused, which ends its blocks."""
        if not plan.spans:
            can_wait = self._in_flight or not self._transit.is_empty
            assert can_wait or not (self._waiting or self._running), (
                f"{len(self._waiting)} waiting and {len(self._running)} running blocks cannot go on"
            )
            return None
        self.launched(plan)
        try:
            self._attach(plan)
            return InFlight(plan, self._runner.launch(plan.spans))
        except (AssertionError, DeviceLost):  # a broken rule of ours, or a device that no batch can use any more
            raise
        except Exception as error:  # a device may fail in any way; it ends this batch, visibly
            self._fail(plan, error, at_launch=True)
            return None

    def _land(self, batch: InFlight) -> None:
        """Wait for a batch and take its results in, or end its blocks if it failed as a whole."""
        try:
            result = self._runner.collect(batch.ticket)
        except (AssertionError, DeviceLost):  # as above
            raise
        except Exception as error:
            self._fail(batch.plan, error, at_launch=False)
        else:
            self.advance(batch.plan, result)

    # ---- plan, launched, advance ----------------------------------------------------------------

    def plan(self) -> Plan:
        """The next iteration, from what has landed and what is in flight; changes nothing."""
        limits, free_slots = self._limits, reversed(self._free_slots)
        running = (sequence.task for sequence in self._running.values())
        joining = chain((b.task for b in self._transit.arrived), (queued.task for queued in self._waiting))
        num_slots = num_that_may_join(joining, running, len(self._free_slots))
        decodes = [s.decode_span for s in self._running.values() if s.wants_step and not limits.refresh_only]
        resumed = tuple(self._transit.arrived[:num_slots])
        decodes += [self._span(slot, Phase.DECODE, block.task) for block, slot in zip(resumed, free_slots)]  # noqa: B905
        budget = TokenBudget(
            max_tokens_per_iteration=self._max_tokens,
            block_length=limits.block_length,
            prior=self._deficit,
            decode_tokens=sum(span.num_rows for span in decodes),
        )
        room = Room(self._pages.num_free, self._pages.page_size, num_slots - len(resumed))
        admission = admit((queued.task.canvas_length for queued in self._waiting), budget, room)
        admitted = tuple(self._waiting[: admission.num_admitted])
        refreshes = [self._span(slot, Phase.REFRESH, queued.task) for queued, slot in zip(admitted, free_slots)]  # noqa: B905
        deficit = 0 if limits.refresh_only else admission.deficit
        return Plan((*decodes, *refreshes), admitted, resumed, deficit)

    def launched(self, plan: Plan) -> None:
        """Mark a plan's spans as in flight; the admitted blocks leave the queue with a slot and pages."""
        for block in plan.resumed:
            slot = self._free_slots.pop()
            self._enter(Sequence.resumed(block, slot, self._span(slot, Phase.DECODE, block.task)))
            self._refreshed.append(block.task.key)
        self._transit.leave(len(plan.resumed))
        del self._waiting[: len(plan.admitted)]
        for queued in plan.admitted:
            task = queued.task
            slot = self._free_slots.pop()
            pages = self._pages.take(task.canvas_length)
            assert pages is not None, f"{task.key} was planned without pages"
            self._enter(Sequence(task, slot, pages, queued.received_s, self._span(slot, Phase.DECODE, task)))
            del self._queued[task.key]
        for span in plan.spans:
            self._running[span.slot].in_flight += 1
        self._deficit = plan.deficit
        self._note_state()

    def advance(self, plan: Plan, result: StepResult) -> None:
        """Land a batch: tokens, ends and errors of its blocks; void spans leave no trace but their rows."""
        interval = Interval(max(result.launched_s, self._last_completed_s), result.completed_s)
        self._last_completed_s = result.completed_s
        decoding_canvases: list[int] = []
        for span, got in zip(plan.spans, result.spans, strict=True):
            assert span.slot == got.slot, f"a result for slot {got.slot} where slot {span.slot} was planned"
            sequence = self._running[span.slot]
            sequence.in_flight -= 1
            sequence.last_span_end_s = interval.end_s
            if span.phase is Phase.DECODE:
                decoding_canvases.append(sequence.task.canvas_length)
            if got.void:
                assert sequence.outcome is not None, f"{sequence.task.key} is void but has not ended"
            else:
                sequence.land(got, interval)
            if span.phase is Phase.REFRESH and sequence.outcome is None:
                self._refreshed.append(sequence.task.key)
                if self._limits.refresh_only:
                    self._keep(sequence)
            self._settle(sequence)
        self._log.batch(plan, result, interval, decoding_canvases)
        self._note_state()

    def _fail(self, plan: Plan, error: Exception, *, at_launch: bool) -> None:
        """End every block of a batch that the runner could not run."""
        lines = str(error).splitlines() or [""]
        reason = f"batch failed: {type(error).__name__}: {lines[0]}"
        logger.warning("%s (%d blocks)", reason, len(plan.spans))
        for span in plan.spans:
            sequence = self._running[span.slot]
            sequence.in_flight -= 1
            steps_before = sequence.in_flight if at_launch else 0
            sequence.fail(len(sequence.steps) + steps_before, reason, Fault.BATCH)
            self._settle(sequence)
        self._note_state()

    def _settle(self, sequence: Sequence) -> None:
        """Report a block that has ended and give back what it held, once nothing of it is in flight."""
        if sequence.outcome is None or sequence.in_flight:
            return
        self._leave_slot(sequence)
        if self._limits.refresh_only:
            self._transit.transfer.drop(sequence.task.key)
        self._pages.give(sequence.pages)
        self._ended.append(sequence.block_end(self._eos_token_ids))

    def _end_early(self, end: BlockEnd) -> None:
        """End a block wherever it is, with this report unless it has steps of its own; nothing for an unknown key."""
        key = end.key
        queued = self._queued.pop(key, None)
        if queued is not None:
            del self._waiting[bisect_left(self._waiting, queued.order, key=_BY_ORDER)]
            if not self._waiting:
                self._deficit = 0
            self._outstanding_tokens -= queued.task.canvas_length
            if self._limits.refresh_only:
                self._transit.transfer.drop(key)
            self._ended.append(end)
        elif key in self._running_slots:
            sequence = self._running[self._running_slots[key]]
            sequence.end_early(end)
            self._settle(sequence)
        elif self._transit.drop(key):
            self._ended.append(end)
        self._note_state()

    def _keep(self, sequence: Sequence) -> None:
        """A refreshed block leaves its slot, and waits with its pages for its KV to be sent."""
        assert not sequence.in_flight, f"{sequence.task.key} decodes where only refreshes run"
        self._transit.keep(sequence.task.key, sequence.slot, sequence.pages, sequence.handed_over_by(self._worker_id))
        self._leave_slot(sequence)

    # ---- helpers --------------------------------------------------------------------------------

    @property
    def _max_tokens(self) -> int:
        limits = self._limits
        return limits.max_prefill_tokens_per_batch if limits.refresh_only else limits.max_tokens_per_iteration

    def _report(self) -> StepReport:
        return StepReport(tuple(self._refreshed), tuple(self._ended), tuple(self._reserved), tuple(self._handed_over))

    def _enter(self, sequence: Sequence) -> None:
        self._running[sequence.slot] = sequence
        self._running_slots[sequence.task.key] = sequence.slot
        self._running_length_sum += sequence.task.canvas_length

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.attached:
            self._runner.detach(sequence.slot)
        self._free_slots.append(sequence.slot)
        del self._running[sequence.slot]
        del self._running_slots[sequence.task.key]
        self._running_length_sum -= sequence.task.canvas_length
        if sequence.refreshed_elsewhere is None:
            self._outstanding_tokens -= sequence.task.canvas_length

    def _attach(self, plan: Plan) -> None:
        """Give the runner the blocks that a plan begins with; it may refuse one, and with it the plan."""
        for task in (*(block.task for block in plan.resumed), *(queued.task for queued in plan.admitted)):
            sequence = self._running[self._running_slots[task.key]]
            if sequence.refreshed_elsewhere is not None:
                self._runner.attach(sequence.slot, task, sequence.pages, dict(sequence.fixed))
            else:
                self._runner.attach(sequence.slot, task, sequence.pages)
            sequence.attached = True
            if self._limits.refresh_only:
                self._transit.transfer.begin(sequence.slot, task.key, sequence.pages)

    def _span(self, slot: int, phase: Phase, task: BlockTask) -> Span:
        rows = self._span_rules[phase](task, self._limits.logit_shift)
        return Span(slot, phase, rows.start, rows.num_rows, rows.written_from)

    def _refuse_what_never_fits(self, task: BlockTask) -> None:
        canvas = task.canvas_length
        if canvas > self._limits.max_model_len:
            raise RequestError(
                f"request {task.key.request_id}: a canvas of {canvas} tokens exceeds max_model_len "
                f"{self._limits.max_model_len}; shorten the prompt or gen_length"
            )
        if self._pages.pages_for(canvas) > self._pages.num_pages:
            raise RequestError(
                f"request {task.key.request_id}: a canvas of {canvas} tokens needs {self._pages.pages_for(canvas)} "
                f"KV pages, the worker has {self._pages.num_pages} of {self._pages.page_size} tokens; "
                "shorten the prompt or gen_length, or raise kv_max_pages"
            )

    def _check_pages(self) -> None:
        self._pages.check()
        assert len(self._free_slots) == self._limits.max_batch_size, f"idle with {len(self._free_slots)} slots free"
        if self._pages.num_used:
            raise AssertionError(
                f"idle with {self._pages.num_used} of {self._pages.num_pages} KV pages still lent "
                f"({self._pages.num_free} free)"
            )

    def _note_state(self) -> None:
        busy_or_queued = "busy" if self._running or self._in_flight else "queued" if self._waiting else "idle"
        depths = Depths(
            state=busy_or_queued,
            waiting=len(self._waiting),
            active=len(self._running),
            outstanding_prefill_tokens=self._outstanding_tokens,
            decode_length_sum=self._running_length_sum,
            pages_used=self._pages.num_used,
            deficit_tokens=self._deficit,
        )
        self._log.state(self._clock(), depths)
