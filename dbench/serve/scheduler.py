"""The scheduler: a state machine that takes requests, routes their blocks to workers and ends every one once.

No I/O and no clock of its own: calls bring `now_s`, what must be done is taken with `take_output`.
A request is PENDING or WAITING_NEXT_BLOCK while no worker has its block, PREFILLING once one has,
DECODING once its refresh has ended. A lost worker or a failed batch sends it back to the first two.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

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
from dbench.serve.block_ends import Problem, block_finished, problem_of
from dbench.serve.finished import FinishedRequests, Retention
from dbench.serve.fleet import SCHEDULER, Assignment, Fleet, Worker, WorkerPhase
from dbench.serve.policy import PrefillRoute, RouteState
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, Fault, Request, Status, derive_request_seed
from dbench.serve.tracking import RequestShape, TrackedRequest
from dbench.serve.validation import RequestLimits, check_submission
from dbench.serve.wire import NOT_FOUND, PollState, Submission
from dbench.serve.wire_link import CancelBlock, Command, Drain, EngineProgress, Hello, Ready, RunBlock


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """The numbers that a scheduler goes by."""

    limits: RequestLimits
    mask_token_id: int
    max_block_retries: int
    max_queued_requests: int
    worker_timeout_s: float
    """Of one iteration of a worker, and of its silence."""
    retention: Retention = field(default_factory=Retention)
    """Of finished requests, for Poll."""


@dataclass(slots=True)
class SchedulerOutput:
    """What came of the calls since the last take_output, in order."""

    commands: list[tuple[int, Command]] = field(default_factory=list)
    """With the worker that gets each."""
    events: list[Event] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Requests of which a client may see more than before."""


class Scheduler:
    """Every public call leaves all pending blocks routed if any worker is ready."""

    def __init__(
        self,
        rules: SchedulerRules,
        fleet: Fleet,
        policy: PrefillRoute,
        route_state: RouteState,
        new_id: Callable[[], str],
    ) -> None:
        self.rules = rules
        self.fleet = fleet
        self.num_by_status: dict[Status, int] = dict.fromkeys((s for s in Status if s.is_final), 0)
        self._policy = policy
        self._route_state = route_state
        self._new_id = new_id
        self._running: dict[str, TrackedRequest] = {}
        self._finished = FinishedRequests(rules.retention, rules.mask_token_id)
        self._pending: dict[str, TrackedRequest] = {}
        self._pending_tokens = 0
        self._num_submitted = 0
        self._last_depth = (0, 0)
        self._output = SchedulerOutput()

    @property
    def num_in_server(self) -> int:
        """Requests without a final status."""
        return len(self._running)

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
        self._finished.forget_old(now_s)
        limits = self.rules.limits
        check_submission(submission, limits)
        if len(self._running) >= self.rules.max_queued_requests:
            raise QueueFullError(
                f"the server holds {len(self._running)} requests, its max_queued_requests; try again later"
            )
        if not self.fleet.can_still_work:
            raise ServerUnavailable(self._no_worker_left())
        tracked = self._track(submission, now_s)
        self._running[tracked.request.request_id] = tracked
        self._emit(
            RequestArrived(now_s, SCHEDULER, tracked.request.request_id, len(tracked.tokens), submission.gen_length)
        )
        self._make_pending(tracked, now_s)
        self._settle(now_s)
        return tracked

    def poll(self, request_id: str, now_s: float) -> PollState:
        self._finished.forget_old(now_s)
        tracked = self._running.get(request_id)
        if tracked is not None:
            return tracked.poll_state(self.rules.mask_token_id)
        return self._finished.poll(request_id) or PollState(NOT_FOUND)

    def cancel(self, request_id: str, now_s: float, reason: str = "cancelled by the client") -> str:
        """End a request as CANCELLED unless it is final; returns its status after the call."""
        self._finished.forget_old(now_s)
        tracked = self._running.get(request_id)
        if tracked is None:
            return self._finished.status(request_id) or NOT_FOUND
        self._finish(tracked, Status.CANCELLED, reason, now_s)
        self._settle(now_s)
        return tracked.status.value

    def cancel_all(self, reason: str, now_s: float) -> None:
        """End every request that is not final as CANCELLED."""
        for tracked in list(self._running.values()):
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
        self._emit(
            WorkerUp(now_s, SCHEDULER, hello.worker_id, hello.device, ready.pages_total, ready.kv_page_size, hello.pid)
        )
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
        for key in list(worker.assignments):
            self._end_block(worker, BlockEnd.without_steps(key, BlockOutcome.FAILED, loss, fault), now_s)
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
        for key in progress.refreshed:
            tracked = self._current(worker, key)
            if tracked is not None:
                tracked.status = Status.DECODING
        for end in progress.ended:
            self._end_block(worker, end, now_s)
        self._settle(now_s)

    # ---- blocks ----

    def _end_block(self, worker: Worker, end: BlockEnd, now_s: float) -> None:
        tracked = self._current(worker, end.key)
        assignment = worker.release(end.key)
        if assignment is None:
            return
        worker.count(end)
        self._emit(block_finished(worker, end, assignment, now_s))
        if tracked is None:
            return
        tracked.worker_id = None
        if end.times is not None and tracked.first_refresh_s is None:
            tracked.first_refresh_s = end.times.refresh_start_s + worker.clock_offset_s
        problem = problem_of(end, tracked, worker)
        if problem is None:
            self._advance(tracked, end, now_s)
        elif problem.fault is Fault.OWN:
            self._finish(tracked, Status.ERROR, problem.text, now_s)
        else:
            self._retry(tracked, worker.worker_id, problem, now_s)

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
        self._pending[tracked.request.request_id] = tracked
        self._pending_tokens += tracked.shape.canvas_length

    def _leave_pending(self, tracked: TrackedRequest) -> None:
        if self._pending.pop(tracked.request.request_id, None) is not None:
            self._pending_tokens -= tracked.shape.canvas_length

    def _settle(self, now_s: float) -> None:
        """Route what can be routed, by submission order, and end what nobody will ever run."""
        if self._pending and self.fleet.in_phase(WorkerPhase.READY):
            for tracked in sorted(self._pending.values(), key=lambda waiting: waiting.serial):
                self._route(tracked, now_s)
        elif self._pending and not self.fleet.can_still_work:
            for tracked in list(self._pending.values()):
                self._finish(tracked, Status.ERROR, self._no_worker_left(), now_s)
        depth = (len(self._pending), self._pending_tokens)
        if depth != self._last_depth:
            self._last_depth = depth
            self._emit(SchedulerDepth(now_s, SCHEDULER, *depth))

    def _route(self, tracked: TrackedRequest, now_s: float) -> None:
        canvas = tracked.shape.canvas_length
        worker = self.fleet.route(self._policy, self._route_state, canvas, tracked.avoid_worker_id)
        assert worker is not None, "routing without a ready worker"
        self._leave_pending(tracked)
        key = tracked.key
        worker.assign(key, Assignment(canvas, tracked.ready_s, now_s))
        tracked.worker_id = worker.worker_id
        tracked.status = Status.PREFILLING
        self._output.commands.append((worker.worker_id, RunBlock(tracked.task())))
        self._emit(BlockRouted(now_s, SCHEDULER, key.request_id, key.block_index, key.attempt, worker.worker_id))

    # ---- requests ----

    def _track(self, submission: Submission, now_s: float) -> TrackedRequest:
        limits = self.rules.limits
        prompt, gen_length = submission.prompt_token_ids, submission.gen_length
        sampling = submission.sampling.with_defaults()
        seed = submission.request_seed
        if seed is None:
            seed = derive_request_seed(prompt, gen_length, sampling, limits.block_length)
        request = Request(self._new_id(), prompt, gen_length, sampling, seed, submission.ignore_eos, now_s)
        shape = RequestShape(
            num_prompt_tokens=len(prompt),
            num_masks=limits.num_masks(gen_length),
            block_length=limits.block_length,
            num_blocks=gen_length // limits.block_length,
        )
        self._num_submitted += 1
        return TrackedRequest(request, shape, self._num_submitted, array("i", prompt), ready_s=now_s)

    def _finish(self, tracked: TrackedRequest, status: Status, error: str, now_s: float) -> None:
        """Give the one final status; a worker that still holds the block is told to drop it."""
        request_id = tracked.request.request_id
        if tracked.worker_id is not None:
            self._output.commands.append((tracked.worker_id, CancelBlock(tracked.key)))
        self._leave_pending(tracked)
        tracked.finish(status, error, now_s)
        del self._running[request_id]
        self._finished.add(request_id, tracked.poll_state(self.rules.mask_token_id), tracked.tokens)
        self.num_by_status[status] += 1
        self._output.changed.append(request_id)
        self._emit(
            RequestFinished(
                now_s, SCHEDULER, request_id, status.value, tracked.num_gen_tokens, tracked.num_forward_passes, error
            )
        )

    def _current(self, worker: Worker, key: BlockKey) -> TrackedRequest | None:
        """The request whose current attempt this is, on this worker; None for anything late or foreign."""
        tracked = self._running.get(key.request_id)
        if tracked is None or tracked.worker_id != worker.worker_id or tracked.key != key:
            return None
        return tracked

    def _no_worker_left(self) -> str:
        hint = "start one with 'dbench worker'" if self.fleet.takes_remote else "restart the server"
        return f"no worker is left; {self.fleet.last_loss or 'all of them have ended'}; {hint}"

    def _emit(self, event: Event) -> None:
        self._output.events.append(event)
