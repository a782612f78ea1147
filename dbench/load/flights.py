"""Requests on their way: sends them, waits for them, and writes down what happened to each."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dbench.errors import ServerUnavailable
from dbench.events import RequestDone, RequestSent
from dbench.load.questions import NO_ANSWER, Answer, Questions
from dbench.load.record import EventWriter, Tally
from dbench.load.stop import DoneFact, SentFact, StopRule
from dbench.load.target import CANCELLED, ERROR, LoadRequest, Outcome, Target

log = logging.getLogger(__name__)

WARMUP, MEASURED, TAIL = "warmup", "measured", "tail"
TIMEOUT = "TIMEOUT"
CANCEL_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ends: the fields of events.RunEnded."""

    reason: str
    detail: str = ""


@dataclass(slots=True)
class _Flight:
    """One request between its send and its end."""

    request: LoadRequest
    role: str
    intended_s: float
    sent_s: float
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """How the log names the requests that a run gives up."""

    status: str
    error: str


@dataclass(slots=True)
class Flights:
    """Sends to one target; must be used from one event loop."""

    target: Target
    log: EventWriter
    tally: Tally
    rule: StopRule | None
    end: Callable[[Ending], None]
    """Told when the target is gone."""
    crash: Callable[[BaseException], None]
    """Told of any exception that is no outcome."""
    questions: Questions | None = None
    """To check answers by; None: they are not checked."""
    _tasks: set[asyncio.Task[bool]] = field(default_factory=set)
    _given_up: Unfinished = field(default_factory=lambda: Unfinished(CANCELLED, "the run was over"))

    def start(self, request: LoadRequest, role: str, intended_s: float) -> asyncio.Task[bool]:
        """Send a request now; the task's result, once its end is written, says whether it completed."""
        task = asyncio.create_task(self._fly(request, role, intended_s))
        self._tasks.add(task)
        task.add_done_callback(self._landed)
        return task

    async def give_up(self, unfinished: Unfinished) -> None:
        """Cancel everything in flight and write it down as `unfinished`; tail requests are merely cancelled."""
        self._given_up = unfinished
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
            if stuck:
                log.warning("%d requests did not end within %g s of their cancellation", len(stuck), CANCEL_GRACE_S)

    async def _fly(self, request: LoadRequest, role: str, intended_s: float) -> bool:
        flight = _Flight(request, role, intended_s, sent_s=time.monotonic())
        self._count_sent(flight)
        try:
            outcome = await self.target.generate(request, lambda request_id: self._accepted(flight, request_id))
        except asyncio.CancelledError:
            self._done(flight, self._unfinished(flight), is_given_up=True)
            raise
        except ServerUnavailable as error:
            self._done(flight, Outcome(flight.request_id, ERROR, (), 0, None, str(error)))
            self.end(Ending("server_lost", str(error)))
            return False
        self._done(flight, outcome)
        return outcome.completed

    def _unfinished(self, flight: _Flight) -> Outcome:
        given_up = self._given_up if flight.role != TAIL else Unfinished(CANCELLED, "the run was over")
        return Outcome(flight.request_id, given_up.status, (), 0, None, given_up.error)

    def _count_sent(self, flight: _Flight) -> None:
        self.tally.in_flight += 1
        if flight.role == MEASURED:
            self.tally.sent(flight.sent_s - flight.intended_s)
            if self.rule is not None:
                self.rule.sent(SentFact(flight.request.index, flight.intended_s, flight.sent_s))

    def _accepted(self, flight: _Flight, request_id: str) -> None:
        """Write the send as soon as the target has named the request."""
        flight.request_id = request_id
        self.log.write(
            RequestSent(
                at_s=flight.sent_s,
                source="client",
                request_id=request_id,
                index=flight.request.index,
                role=flight.role,
                intended_s=flight.intended_s,
                num_prompt_tokens=len(flight.request.prompt_token_ids),
                gen_length=flight.request.gen_length,
                task="" if flight.request.problem is None else flight.request.problem.task,
            )
        )

    def _done(self, flight: _Flight, outcome: Outcome, *, is_given_up: bool = False) -> None:
        """Write the end down; one that the run itself gave up is a failure, but no error to show."""
        done_s = time.monotonic()
        if not flight.request_id:  # never accepted: the log needs a name all the same
            self._accepted(flight, outcome.request_id or f"unaccepted-{flight.role}-{flight.request.index}")
        answer = self._answer(flight.request, outcome)
        self.log.write(
            RequestDone(
                at_s=done_s,
                source="client",
                request_id=flight.request_id,
                status=outcome.status,
                num_gen_tokens=len(outcome.token_ids),
                num_forward_passes=outcome.num_forward_passes,
                first_block_s=outcome.first_block_s,
                error=outcome.error,
                token_ids_sha256=_digest(outcome.token_ids) if outcome.completed else "",
                answer_is_right=None if answer is None else answer.is_right,
                answer_text="" if answer is None or answer.is_right else answer.text,
            )
        )
        self.tally.in_flight -= 1
        if flight.role == WARMUP and not outcome.completed and not is_given_up:
            log.warning("warm-up request %s: %s %s", flight.request_id, outcome.status, outcome.error)
        if flight.role == MEASURED:
            if outcome.completed:
                self.tally.completed(done_s - flight.intended_s)
            else:
                self.tally.failed(None if is_given_up else f"{flight.request_id}: {outcome.status} {outcome.error}")
            if self.rule is not None:
                self.rule.done(DoneFact(flight.request.index, flight.intended_s, done_s, outcome.completed))
            if self.tally.num_done == self.tally.num_requests:
                self.end(Ending("complete"))

    def _answer(self, request: LoadRequest, outcome: Outcome) -> Answer | None:
        if self.questions is None or request.problem is None:
            return None
        return self.questions.answer(request.problem, outcome.token_ids) if outcome.completed else NO_ANSWER

    def _landed(self, task: asyncio.Task[bool]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)


def _digest(token_ids: tuple[int, ...]) -> str:
    """SHA-256 of the ids as decimal text joined by commas, in hex."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
