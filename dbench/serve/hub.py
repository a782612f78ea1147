"""The scheduler at work in an event loop: every call is one step of the state machine and of what follows.

Commands go to the queues of worker streams, events to the recorder, changes to the tasks that wait for
them. All methods run in one event loop's thread, and none waits but those that begin with `until`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dbench.errors import ServerUnavailable
from dbench.events import Event, RequestFinished, WorkerLeft, WorkerLost, WorkerUp
from dbench.progress import ServerState
from dbench.serve.fleet import WorkerPhase
from dbench.serve.recorder import Recorder
from dbench.serve.scheduler import Scheduler
from dbench.serve.sequence import Status
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire import EventLines, PollState, Submission, WorkerCount, WorkerStatus
from dbench.serve.wire_link import Command, EngineProgress, Hello, Ready
from dbench.values import counted

MAX_RECENT_ERRORS = 5

logger = logging.getLogger(__name__)


class Link:
    """The commands for one worker's stream, from its beginning to `close`; its writer stops at None."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[Command | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    def close(self) -> None:
        """Nothing that comes up the stream counts any more."""
        self.commands.put_nowait(None)
        self.closed.set()


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
        self.has_ended = False
        """Nothing of the server is left."""
        self.fatal_errors: dict[int, str] = {}
        """What workers said before they ended, by worker id, until they are started again."""
        self.recent_errors: deque[str] = deque(maxlen=MAX_RECENT_ERRORS)
        self.num_exports = 0
        """Times that a client has fetched all events."""
        self._scheduler = scheduler
        self._recorder = recorder
        self._log_requests = log_requests
        self._links: dict[int, Link] = {}
        self._watchers: dict[str, list[asyncio.Event]] = {}
        self._moves: list[asyncio.Future[None]] = []
        self._news: list[asyncio.Future[None]] = []

    # ---- for clients ----

    @property
    def state(self) -> ServerState:
        if self.has_ended:
            return ServerState.ENDED
        if self.is_draining:
            return ServerState.DRAINING
        if not self.is_open:
            return ServerState.STARTING
        return ServerState.READY if self.is_ready else ServerState.NOT_READY

    @property
    def is_ready(self) -> bool:
        """Requests that come now will be run by somebody."""
        return self.is_open and not self.is_draining and self._scheduler.fleet.can_work

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

    def worker_counts(self) -> tuple[WorkerCount, ...]:
        return self._scheduler.fleet.counts()

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
        """All events that are kept; whoever has read them to the end has exported them."""
        yield from self._recorder.export()
        self.num_exports += 1
        self.announce()

    # ---- for workers ----

    def is_expected(self, worker_id: int) -> bool:
        """A worker with this id is starting and has no stream yet."""
        fleet = self._scheduler.fleet
        is_starting = worker_id in fleet and fleet[worker_id].phase is WorkerPhase.STARTING
        return is_starting and worker_id not in self._links

    def join(self, hello: Hello) -> Hello:
        """Take in a worker that the server has not started; returns its hello with its number and full device."""
        fleet = self._scheduler.fleet
        self.worker_gone(fleet.place_of(hello).worker_id, "it has dialled again")
        worker = fleet.join(hello)
        self.fatal_errors.pop(worker.worker_id, None)
        logger.info("worker %d (%s, %s) joins", worker.worker_id, worker.kind, worker.device)
        return replace(hello, worker_id=worker.worker_id, device=worker.device)

    def kind_of(self, worker_id: int) -> str:
        return self._scheduler.fleet[worker_id].kind

    def connect(self, worker_id: int) -> Link:
        """For a worker whose stream has begun."""
        assert worker_id not in self._links, f"worker {worker_id} has a stream already"
        return self._links.setdefault(worker_id, Link())

    def worker_ready(self, hello: Hello, ready: Ready) -> None:
        """Raises ValueError when it was ready before."""
        self._scheduler.worker_ready(hello, ready, self.clock())
        if ready.metrics_address:
            logger.info("worker %s: health and metrics at http://%s", hello.worker_id, ready.metrics_address)
        self._follow_up()
        self.announce()

    def worker_leaves(self, worker_id: int) -> None:
        """A worker wants to be drained."""
        logger.info("worker %d leaves", worker_id)
        self._scheduler.worker_leaves(worker_id, self.clock())
        self._follow_up()
        self.announce()

    def progress(self, worker_id: int, progress: EngineProgress) -> None:
        """Raises ValueError for a message that makes no sense."""
        self._scheduler.progress(worker_id, progress, self.clock())
        self._follow_up()

    def link_ended(self, worker_id: int, link: Link, reason: str) -> None:
        """A stream has ended, and with it its worker, unless that was taken for lost before."""
        if self._links.get(worker_id) is link:
            self.worker_gone(worker_id, reason)

    def worker_gone(self, worker_id: int, reason: str) -> None:
        """A worker is lost, or has ended after a drain; only the first call counts."""
        link = self._links.pop(worker_id, None)
        if link is not None:
            link.close()
        self._scheduler.worker_gone(worker_id, self.fatal_errors.get(worker_id, reason), self.clock())
        self._follow_up()
        self.announce()

    def lose_hanging_workers(self) -> None:
        """To be called every second or so."""
        for worker_id, reason in self._scheduler.find_hanging_workers(self.clock()):
            self.worker_gone(worker_id, reason)
        for worker_id, reason in self._scheduler.fleet.find_absent():
            self.give_up(worker_id, reason)

    def drain_workers(self) -> None:
        self._scheduler.drain_workers(self.clock())
        self._follow_up()
        for worker_id, link in list(self._links.items()):
            if self._scheduler.fleet[worker_id].phase.is_away:  # it was still starting
                del self._links[worker_id]
                link.close()
        self.announce()

    # ---- for whoever starts lost workers again ----

    def await_lost_workers(self, *, is_on: bool) -> None:
        """Whether blocks wait for workers that are lost from now on."""
        self._scheduler.fleet.awaits_lost = is_on

    def is_awaited(self, worker_id: int) -> bool:
        """It was lost and is to be started again."""
        return self._scheduler.fleet[worker_id].phase is WorkerPhase.AWAITED

    def is_starting(self, worker_id: int) -> bool:
        return self._scheduler.fleet[worker_id].phase is WorkerPhase.STARTING

    def ready_for_s(self, worker_id: int) -> float | None:
        """How long a lost worker had been ready; None when it never was since its last start."""
        return self._scheduler.fleet[worker_id].ready_for_s

    def worker_starts(self, worker_id: int) -> None:
        """An awaited worker's new process is about to dial in."""
        self.fatal_errors.pop(worker_id, None)
        self._scheduler.worker_starts(worker_id)

    def give_up(self, worker_id: int, reason: str) -> None:
        """An awaited worker will not come back; `reason` follows its number in a sentence."""
        self.recent_errors.append(f"worker {worker_id} {reason}")
        logger.error("worker %d %s", worker_id, reason)
        self._scheduler.give_up(worker_id, reason, self.clock())
        self._follow_up()
        self.announce()

    # ---- for the server ----

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is tried whenever the scheduler has moved."""
        while not condition():
            move = asyncio.get_running_loop().create_future()
            self._moves.append(move)
            await move

    def all_workers_ready(self) -> bool:
        """All that are expected; others may have joined besides."""
        return self._scheduler.fleet.is_complete

    def has_no_worker(self) -> bool:
        return not self._links

    async def until_news(self, condition: Callable[[], bool]) -> None:
        """As `until`, but tried only when a worker has come or gone, or somebody has called `announce`."""
        while not condition():
            news = asyncio.get_running_loop().create_future()
            self._news.append(news)
            await news

    def announce(self) -> None:
        """Let all who wait look again after a change outside the scheduler."""
        news, self._news = self._news, []
        _wake(news)
        self._wake_all()

    def _wake_all(self) -> None:
        moves, self._moves = self._moves, []
        _wake(moves)

    def _follow_up(self) -> None:
        output = self._scheduler.take_output()
        for worker_id, command in output.commands:
            link = self._links.get(worker_id)
            if link is not None:
                link.commands.put_nowait(command)
        self._recorder.record(output.events)
        for event in output.events:
            self._log(event)
        for request_id in output.changed:
            for watcher in self._watchers.get(request_id, ()):
                watcher.set()
        self._wake_all()

    def _log(self, event: Event) -> None:
        match event:
            case WorkerLost():
                self.recent_errors.append(f"worker {event.worker_id} was lost: {event.reason}")
                logger.error("worker %d was lost: %s", event.worker_id, event.reason)
            case WorkerLeft():
                if not self.is_draining:
                    logger.info("worker %d has left", event.worker_id)
            case WorkerUp():
                if self._scheduler.fleet[event.worker_id].num_losses:
                    logger.info("worker %d is back", event.worker_id)
            case RequestFinished():
                if event.status == Status.ERROR:
                    self.recent_errors.append(f"request {event.request_id}: {event.error}")
                    logger.error("request %s ended as ERROR: %s", event.request_id, event.error)
                elif self._log_requests:
                    logger.info(
                        "request %s %s: %s, %s",
                        event.request_id,
                        event.status,
                        counted(event.num_gen_tokens, "token"),
                        counted(event.num_forward_passes, "forward pass", "forward passes"),
                    )


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
