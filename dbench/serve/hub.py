"""The scheduler at work in an event loop: every call is one step of the state machine and of what follows.

Commands go to the queues of worker streams, events to the recorder, changes to the tasks that wait for
them. All methods run in one event loop's thread, and none of them but `until` waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dbench.errors import ServerUnavailable
from dbench.events import Event, RequestFinished, WorkerLost
from dbench.progress import ServerState
from dbench.serve.fleet import WorkerPhase
from dbench.serve.recorder import Recorder
from dbench.serve.scheduler import Scheduler
from dbench.serve.sequence import Status
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire import EventLines, PollState, Submission, WorkerStatus
from dbench.serve.wire_link import Command, EngineProgress, Hello, Ready

MAX_RECENT_ERRORS = 5

logger = logging.getLogger(__name__)


class Hub:
    """One scheduler, its recorder, and everybody who waits for it."""

    def __init__(
        self,
        scheduler: Scheduler,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = time.monotonic,
        log_requests: bool = False,
    ) -> None:
        self.clock = clock
        self.is_open = False
        """All workers were ready once."""
        self.is_draining = False
        self.fatal_errors: dict[int, str] = {}
        """What workers said before they ended, by worker id."""
        self.recent_errors: deque[str] = deque(maxlen=MAX_RECENT_ERRORS)
        self._scheduler = scheduler
        self._recorder = recorder
        self._log_requests = log_requests
        self._links: dict[int, asyncio.Queue[Command | None]] = {}
        self._watchers: dict[str, list[asyncio.Event]] = {}
        self._moves: list[asyncio.Future[None]] = []

    # ---- for clients ----

    @property
    def state(self) -> ServerState:
        if self.is_draining:
            return ServerState.DRAINING
        if not self.is_open:
            return ServerState.STARTING
        return ServerState.READY if self.is_ready else ServerState.NOT_READY

    @property
    def is_ready(self) -> bool:
        """Requests that come now will be run by somebody."""
        return self.is_open and not self.is_draining and bool(self._scheduler.fleet.in_phase(WorkerPhase.READY))

    @property
    def num_in_server(self) -> int:
        return self._scheduler.num_in_server

    @property
    def num_pending(self) -> int:
        return self._scheduler.num_pending

    def num_ended(self, status: Status) -> int:
        """Requests that have ended so."""
        return self._scheduler.num_by_status[status]

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        return self._scheduler.fleet.statuses()

    def submit(self, submission: Submission) -> TrackedRequest:
        """Raises what Scheduler.submit raises, and ServerUnavailable while draining."""
        if self.is_draining:
            raise ServerUnavailable("the server is draining and takes no new requests")
        tracked = self._scheduler.submit(submission, self.clock())
        self._follow_up()
        return tracked

    def poll(self, request_id: str) -> PollState:
        return self._scheduler.poll(request_id, self.clock())

    def result(self, tracked: TrackedRequest) -> PollState:
        """As `poll`, also for a request that has been forgotten since."""
        return tracked.poll_state(self._scheduler.rules.mask_token_id)

    def cancel(self, request_id: str, reason: str) -> str:
        status = self._scheduler.cancel(request_id, self.clock(), reason)
        self._follow_up()
        return status

    def cancel_all(self, reason: str) -> None:
        self._scheduler.cancel_all(reason, self.clock())
        self._follow_up()

    @contextmanager
    def watch(self, request_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the client of this request may see more."""
        event = asyncio.Event()
        self._watchers.setdefault(request_id, []).append(event)
        try:
            yield event
        finally:
            self._watchers[request_id].remove(event)
            if not self._watchers[request_id]:
                del self._watchers[request_id]

    def reset_metrics(self) -> float:
        """Forget the events so far; returns the moment."""
        now_s = self.clock()
        self._recorder.reset(now_s)
        return now_s

    def export(self) -> Iterator[EventLines]:
        return self._recorder.export()

    # ---- for workers ----

    def is_expected(self, worker_id: int) -> bool:
        """A worker with this id is starting and has no stream yet."""
        fleet = self._scheduler.fleet
        is_starting = worker_id in fleet and fleet[worker_id].phase is WorkerPhase.STARTING
        return is_starting and worker_id not in self._links

    def connect(self, worker_id: int) -> asyncio.Queue[Command | None]:
        """The queue of commands for a worker whose stream has begun; its reader stops at None."""
        assert worker_id not in self._links, f"worker {worker_id} has a stream already"
        return self._links.setdefault(worker_id, asyncio.Queue())

    def worker_ready(self, hello: Hello, ready: Ready) -> None:
        """Raises ValueError when it was ready before."""
        self._scheduler.worker_ready(hello, ready, self.clock())
        self._follow_up()

    def progress(self, worker_id: int, progress: EngineProgress) -> None:
        """Raises ValueError for a message that makes no sense."""
        self._scheduler.progress(worker_id, progress, self.clock())
        self._follow_up()

    def worker_gone(self, worker_id: int, reason: str) -> None:
        """The stream or the process of a worker has ended; only the first call counts."""
        self._links.pop(worker_id, None)
        self._scheduler.worker_gone(worker_id, self.fatal_errors.get(worker_id, reason), self.clock())
        self._follow_up()

    def drain_workers(self) -> None:
        self._scheduler.drain_workers(self.clock())
        self._follow_up()

    # ---- for the server ----

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is tried whenever the scheduler has moved."""
        while not condition():
            move = asyncio.get_running_loop().create_future()
            self._moves.append(move)
            await move

    def all_workers_ready(self) -> bool:
        return all(worker.ready for worker in self.worker_statuses())

    def all_workers_ended(self) -> bool:
        fleet = self._scheduler.fleet
        return len(fleet.in_phase(WorkerPhase.LOST, WorkerPhase.ENDED)) == len(fleet.workers)

    def announce(self) -> None:
        """Let `until` look again after a change outside the scheduler."""
        moves, self._moves = self._moves, []
        for move in moves:
            if not move.done():
                move.set_result(None)

    def _follow_up(self) -> None:
        output = self._scheduler.take_output()
        for worker_id, command in output.commands:
            link = self._links.get(worker_id)
            if link is not None:
                link.put_nowait(command)
        self._recorder.record(output.events)
        for event in output.events:
            self._log(event)
        for request_id in output.changed:
            for watcher in self._watchers.get(request_id, ()):
                watcher.set()
        self.announce()

    def _log(self, event: Event) -> None:
        match event:
            case WorkerLost():
                self.recent_errors.append(f"worker {event.worker_id} was lost: {event.reason}")
                logger.error("worker %d was lost: %s", event.worker_id, event.reason)
            case RequestFinished():
                if event.status == Status.ERROR:
                    self.recent_errors.append(f"request {event.request_id}: {event.error}")
                    logger.error("request %s ended as ERROR: %s", event.request_id, event.error)
                elif self._log_requests:
                    logger.info(
                        "request %s %s: %d tokens, %d forward passes",
                        event.request_id,
                        event.status,
                        event.num_gen_tokens,
                        event.num_forward_passes,
                    )
