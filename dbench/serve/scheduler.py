"""The scheduler: a state machine that takes requests, routes their blocks to workers and ends every one once.

No I/O and no clock of its own: calls bring `now_s`, what must be done is taken with `take_output`.
A request is PENDING or WAITING_NEXT_BLOCK while no worker has its block, PREFILLING once one has,
DECODING once its refresh has ended. A lost worker or a failed batch sends it back to the first two.

In hybrid mode a block may have two workers, one that refreshes it and one that decodes it. The second takes pages
first (ReserveBlock), then the first is told to send the KV there (SendBlock); a refreshed block is WAITING_DECODE
until the second has begun with it. Whatever one of them reports, the attempt ends for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dbench.errors import QueueFullError, ServerUnavailable
from dbench.events import (
    BlockRouted,
    Event,
    RequestArrived,
    RequestFinished,
    SchedulerDepth,
    WorkerLeft,
    WorkerLost,
    WorkerState,
    WorkerUp,
    event_from_json,
    shifted,
)
from dbench.serve.backlog import Backlog
from dbench.serve.block_ends import Problem, block_finished, problem_of
from dbench.serve.block_pairs import blamed, has_begun_elsewhere, judged, may_go_on, pair, part_from_decoder
from dbench.serve.fleet import SCHEDULER, Assignment, Fleet, Worker, WorkerPhase
from dbench.serve.placement import Placement, Placer
from dbench.serve.requests import Requests
from dbench.serve.scheduler_records import SchedulerOutput, SchedulerRules
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, Fault, HandedOver, Status
from dbench.serve.tracking import TrackedRequest
from dbench.serve.validation import check_submission
from dbench.serve.wire import NOT_FOUND, PollState, Submission
from dbench.serve.wire_link import (
    CancelBlock,
    Drain,
    EngineProgress,
    Hello,
    Ready,
    RunBlock,
    SendBlock,
)


class Scheduler:
    """Every public call leaves all blocks routed that the placer has a place for."""

    def __init__(self, rules: SchedulerRules, fleet: Fleet, placer: Placer, new_id: Callable[[], str]) -> None:
        self.rules = rules
        self.fleet = fleet
        self._placer = placer
        self._requests = Requests(rules, new_id)
        self._pending = Backlog()
        self._decode_ready = Backlog()
        """Nobody is to decode it yet, and its refresh has ended, or it has lost whoever was to."""
        self._last_depth = (0, 0, 0)
        self._output = SchedulerOutput()

    @property
    def num_by_status(self) -> Mapping[Status, int]:
        """Requests that have ended, by their final status."""
        return self._requests.num_by_status

    @property
    def num_in_server(self) -> int:
        """Requests without a final status."""
        return len(self._requests.running)

    @property
    def num_pending(self) -> int:
        """Requests with a block that no worker has yet."""
        return len(self._pending)

    def take_output(self) -> SchedulerOutput:
        output, self._output = self._output, SchedulerOutput()
        return output

    # ---- calls of clients ----

    def submit(self, submission: Submission, now_s: float) -> TrackedRequest:
        """Take a request in; the record is the scheduler's own and only to be read.

        Raises RequestError, QueueFullError, or ServerUnavailable when no worker is left to run it.
        """
        self._requests.forget_old(now_s)
        limits = self.rules.limits
        check_submission(submission, limits)
        if len(self._requests.running) >= self.rules.max_queued_requests:
            raise QueueFullError(
                f"the server holds {len(self._requests.running)} requests, its max_queued_requests; try again later"
            )
        if not self.fleet.can_still_work:
            raise ServerUnavailable(self._no_worker_left())
        tracked = self._requests.add(submission, now_s)
        self._emit(
            RequestArrived(now_s, SCHEDULER, tracked.request.request_id, len(tracked.tokens), submission.gen_length)
        )
        self._make_pending(tracked, now_s)
        self._settle(now_s)
        return tracked

    def poll(self, request_id: str, now_s: float) -> PollState:
        self._requests.forget_old(now_s)
        return self._requests.poll(request_id) or PollState(NOT_FOUND)

    def cancel(self, request_id: str, now_s: float, reason: str = "cancelled by the client") -> str:
        """End a request as CANCELLED unless it is final; returns its status after the call."""
        self._requests.forget_old(now_s)
        tracked = self._requests.running.get(request_id)
        if tracked is None:
            return self._requests.finished.status(request_id) or NOT_FOUND
        self._finish(tracked, Status.CANCELLED, reason, now_s)
        self._settle(now_s)
        return tracked.status.value

    def cancel_all(self, reason: str, now_s: float) -> None:
        """End every request that is not final as CANCELLED."""
        for tracked in list(self._requests.running.values()):
            self._finish(tracked, Status.CANCELLED, reason, now_s)
        self._settle(now_s)

    # ---- what happens to workers ----

    def worker_ready(self, hello: Hello, ready: Ready, now_s: float) -> None:
        """A starting worker has loaded its model and takes blocks from now on. ValueError if it is not starting."""
        assert hello.worker_id is not None, "a worker that is ready has been given its id"
        worker = self.fleet[hello.worker_id]
        if worker.phase is not WorkerPhase.STARTING:
            raise ValueError(f"worker {hello.worker_id} says that it is ready but is {worker.phase}, not starting")
        worker.become_ready(hello.device, hello.pid, ready, now_s)
        pages, page_size = ready.pages_total, ready.kv_page_size
        self._emit(WorkerUp(now_s, SCHEDULER, hello.worker_id, hello.device, pages, page_size, hello.pid, worker.kind))
        self._settle(now_s)

    def worker_leaves(self, worker_id: int, now_s: float) -> None:
        """A worker wants to end: it gets nothing new, finishes what it runs and hands back the rest."""
        worker = self.fleet[worker_id]
        if worker.phase in (WorkerPhase.STARTING, WorkerPhase.READY):
            self._drain(worker)
            self._settle(now_s)

    def drain_workers(self, now_s: float) -> None:
        """Let ready workers finish what they hold and end; they get nothing new, and nobody waits for others."""
        self.fleet.is_closing = True
        for worker in self.fleet.in_phase(WorkerPhase.READY):
            self._drain(worker)
        for worker in self.fleet.in_phase(WorkerPhase.STARTING, WorkerPhase.AWAITED):
            worker.leave(WorkerPhase.ENDED, now_s)
        self._settle(now_s)

    def worker_gone(self, worker_id: int, reason: str, now_s: float) -> None:
        """A worker's stream or process has ended: what it held is restarted elsewhere. A second call does nothing."""
        worker = self.fleet[worker_id]
        if worker.phase.is_away:
            return
        if worker.phase is WorkerPhase.DRAINING:
            loss, fault = f"worker {worker_id} left", Fault.NOBODY
            self._emit(WorkerLeft(now_s, SCHEDULER, worker_id))
        else:
            loss, fault = f"worker {worker_id} was lost: {reason}", Fault.WORKER
            self._emit(WorkerLost(now_s, SCHEDULER, worker_id, reason))
        self.fleet.vacate(worker, loss, now_s)
        self.fleet.links.end_all_of(worker_id)
        for key in list(worker.assignments):
            self._lose_block(worker, BlockEnd.without_steps(key, BlockOutcome.FAILED, loss, fault), now_s)
        self._settle(now_s)

    def _drain(self, worker: Worker) -> None:
        worker.phase = WorkerPhase.DRAINING
        self._output.commands.append((worker.worker_id, Drain()))

    def worker_starts(self, worker_id: int) -> None:
        """An awaited worker is started again and may dial in."""
        worker = self.fleet[worker_id]
        assert worker.phase is WorkerPhase.AWAITED, f"worker {worker_id} is started again but is {worker.phase}"
        worker.start()

    def give_up(self, worker_id: int, reason: str, now_s: float) -> None:
        """An awaited worker does not come back."""
        worker = self.fleet[worker_id]
        assert worker.phase is WorkerPhase.AWAITED, f"worker {worker_id} is given up but is {worker.phase}"
        worker.phase = WorkerPhase.LOST
        self.fleet.last_loss = f"worker {worker_id} {reason}"
        self._settle(now_s)

    def find_hanging_workers(self, now_s: float) -> list[tuple[int, str]]:
        """Workers that hang, and why they count as lost; to be called every second or so."""
        return self.fleet.find_hanging(now_s, self.rules.worker_timeout_s)

    def progress(self, worker_id: int, progress: EngineProgress, now_s: float) -> None:
        """Take in a worker's message; blocks that it does not hold are dropped. Raises ValueError for a bad event."""
        worker = self.fleet[worker_id]
        worker.hear(now_s, progress)
        for line in progress.event_lines:
            event = shifted(event_from_json(line), worker.clock_offset_s)
            if isinstance(event, WorkerState):
                worker.last_state = event
            self._emit(event)
        for key in progress.reserved:
            self._send_block(worker, key)
        for key in progress.refreshed:
            self._note_refreshed(worker, key)
        for sent in progress.handed_over:
            self._hand_over(worker, sent, now_s)
        for end in progress.ended:
            self._end_block(worker, end, now_s)
        self._settle(now_s)

    # ---- blocks ----

    def _end_block(self, worker: Worker, end: BlockEnd, now_s: float) -> None:
        """The first of a block's workers to report its end ends it for the other too."""
        tracked = self._requests.held_by(worker.worker_id, end.key)
        assignment = worker.release(end.key)
        if assignment is None:
            return
        worker.count(end)
        partner = None if assignment.partner_id is None else self.fleet[assignment.partner_id]
        finished = block_finished(worker, end, assignment, now_s, partner)
        if not assignment.is_reported:
            self._emit(finished)
            if partner is not None and end.key in partner.assignments:
                partner.assignments[end.key].is_reported = True
        if end.fault.ends_link:
            self.fleet.links.end(end.link_epoch)
        if tracked is None:
            return
        self._leave_workers(tracked, but=worker)
        if tracked.first_refresh_s is None:
            tracked.first_refresh_s = finished.refresh_start_s
        problem = problem_of(end, tracked, worker)
        if problem is None:
            self._advance(tracked, end, now_s)
        elif problem.fault is Fault.OWN:
            self._finish(tracked, Status.ERROR, problem.text, now_s)
        else:
            culprit_id, fault = blamed(end, problem.fault, tracked, worker, assignment)
            self._retry(tracked, culprit_id, replace(problem, fault=fault), now_s)

    def _lose_block(self, worker: Worker, end: BlockEnd, now_s: float) -> None:
        """End a block of a lost worker, unless the other one that holds it can go on with it."""
        tracked = self._requests.held_by(worker.worker_id, end.key)
        if tracked is None:
            self._end_block(worker, end, now_s)
        elif has_begun_elsewhere(tracked, worker):
            worker.release(end.key)
            tracked.refresher_id = None
        elif may_go_on(tracked, worker):
            part_from_decoder(tracked, worker, self.fleet, end.error)
            self._decode_ready.add(tracked)
        else:
            self._end_block(worker, judged(end, tracked, worker), now_s)

    def _advance(self, tracked: TrackedRequest, end: BlockEnd, now_s: float) -> None:
        tracked.append_block(end.token_ids, len(end.steps))
        self._output.changed.append(tracked.request.request_id)
        has_ended = end.found_eos and not tracked.request.ignore_eos
        if has_ended or tracked.block_index == tracked.shape.num_blocks:
            self._finish(tracked, Status.COMPLETED, "", now_s)
        else:
            self._make_pending(tracked, now_s)

    def _retry(self, tracked: TrackedRequest, worker_id: int, problem: Problem, now_s: float) -> None:
        tracked.note_failure(worker_id, problem.fault)
        count = tracked.num_failures
        if count > self.rules.max_block_retries:
            times = f"{count} times" if count > 1 else "once"
            error = f"block {tracked.block_index} failed {times}, last on worker {worker_id}: {problem.text}"
            self._finish(tracked, Status.ERROR, error, now_s)
        else:
            self._make_pending(tracked, now_s)

    def _make_pending(self, tracked: TrackedRequest, now_s: float) -> None:
        tracked.ready_s = now_s
        tracked.status = Status.WAITING_NEXT_BLOCK if tracked.block_index else Status.PENDING
        self._pending.add(tracked)

    def _settle(self, now_s: float) -> None:
        """Route what has a place, strictly by submission order, and end what nobody will ever run."""
        while (tracked := self._decode_ready.oldest()) is not None and self.fleet.can_still_work:
            assert tracked.refresher_id is not None, f"{tracked.key} is refreshed but nobody has its KV"
            decoder = self._placer.decoder_for(tracked, self.fleet[tracked.refresher_id])
            if decoder is None:
                break
            self._decode_ready.discard(tracked)
            self._reserve(tracked, decoder)
        while (tracked := self._pending.oldest()) is not None:
            placement = self._placer.place(tracked, others_wait=bool(self._decode_ready))
            if placement is None:
                break
            self._route(tracked, placement, now_s)
        if not self.fleet.can_still_work:
            for tracked in (*self._pending, *self._decode_ready):
                self._finish(tracked, Status.ERROR, self._no_worker_left(), now_s)
        depth = (len(self._pending), self._pending.num_tokens, len(self._decode_ready))
        if depth != self._last_depth:
            self._last_depth = depth
            self._emit(SchedulerDepth(now_s, SCHEDULER, *depth))

    def _route(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> None:
        refresher, decoder, key = placement.refresher, placement.decoder, tracked.key
        canvas = tracked.shape.canvas_length
        self._pending.discard(tracked)
        refresher.assign(key, Assignment(canvas, tracked.ready_s, now_s, canvas, is_charged=tracked.pinned_to is None))
        tracked.status = Status.PREFILLING
        self._output.commands.append((refresher.worker_id, RunBlock(tracked.task())))
        decoder_id = decoder.worker_id if decoder is not None and placement.is_split else None
        self._emit(
            BlockRouted(now_s, SCHEDULER, key.request_id, key.block_index, key.attempt, refresher.worker_id, decoder_id)
        )
        if not placement.is_split:
            tracked.worker_id = refresher.worker_id
            return
        tracked.refresher_id = refresher.worker_id
        if decoder is not None:
            self._reserve(tracked, decoder)

    # ---- blocks with two workers ----

    def _reserve(self, tracked: TrackedRequest, decoder: Worker) -> None:
        self._output.commands.append((decoder.worker_id, pair(tracked, decoder, self.fleet)))

    def _send_block(self, decoder: Worker, key: BlockKey) -> None:
        """The worker that decodes a block has taken pages for it."""
        tracked = self._requests.held_by(decoder.worker_id, key)
        if tracked is not None and tracked.refresher_id is not None:
            command = SendBlock(key, decoder.worker_id, decoder.assignments[key].epoch)
            self._output.commands.append((tracked.refresher_id, command))

    def _note_refreshed(self, worker: Worker, key: BlockKey) -> None:
        """A refresh has ended with masks left; or the KV of one has arrived, and its decode steps begin."""
        if self.fleet.is_hybrid:
            worker.refresh_ended(key)
        tracked = self._requests.held_by(worker.worker_id, key)
        if tracked is None:
            return
        if worker.worker_id == tracked.worker_id:
            tracked.status = Status.DECODING
        elif tracked.status is not Status.DECODING:
            tracked.status = Status.WAITING_DECODE
            if tracked.worker_id is None and tracked not in self._decode_ready:
                self._decode_ready.add(tracked)

    def _hand_over(self, refresher: Worker, sent: HandedOver, now_s: float) -> None:
        """The KV of a block is at the worker that decodes it, or at one that may have begun to, and is lost."""
        tracked = self._requests.held_by(refresher.worker_id, sent.key)
        if tracked is not None and refresher.assignments[sent.key].epoch != sent.epoch:
            loss = BlockEnd.without_steps(sent.key, BlockOutcome.FAILED, tracked.last_loss, Fault.WORKER, sent.epoch)
            self._end_block(refresher, loss, now_s)
            return
        refresher.release(sent.key)
        if tracked is not None:
            tracked.refresher_id = None

    def _leave_workers(self, tracked: TrackedRequest, *, but: Worker | None = None) -> None:
        """Tell the workers that still hold its block to drop it."""
        for worker_id in tracked.holder_ids:
            if but is None or worker_id != but.worker_id:
                self._output.commands.append((worker_id, CancelBlock(tracked.key)))
        tracked.leave_workers()
        self._decode_ready.discard(tracked)

    # ---- requests ----

    def _finish(self, tracked: TrackedRequest, status: Status, error: str, now_s: float) -> None:
        """Give the one final status; a worker that still holds the block is told to drop it."""
        request_id = tracked.request.request_id
        self._leave_workers(tracked)
        self._pending.discard(tracked)
        self._placer.request_ended(tracked)
        self._requests.finish(tracked, status, error, now_s)
        self._output.changed.append(request_id)
        self._emit(
            RequestFinished(
                now_s, SCHEDULER, request_id, status.value, tracked.num_gen_tokens, tracked.num_forward_passes, error
            )
        )

    def _no_worker_left(self) -> str:
        hint = "start one with 'dbench worker'" if self.fleet.takes_remote else "restart the server"
        return f"no worker is left; {self.fleet.last_loss or 'all of them have ended'}; {hint}"

    def _emit(self, event: Event) -> None:
        self._output.events.append(event)
