"""One run: warm up, send the drawn requests when they are due, wait for their ends, fetch the server's events.

Open loop: sends happen at absolute times, whatever the server does. Closed loop: a send follows an end.
Every measured request leaves two lines in events.jsonl, its send and its end, written as they happen.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path

from dbench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ServerUnavailable, one_line
from dbench.events import SCHEMA_VERSION, RunEnded, RunStarted
from dbench.load.flights import MEASURED, TAIL, TIMEOUT, WARMUP, Ending, Flights, Unfinished
from dbench.load.pacing import punctual, sleep_until
from dbench.load.record import EventWriter, Tally
from dbench.load.schedule import Schedule, ScheduledRequest, draw_schedule
from dbench.load.stop import StopRule
from dbench.load.target import CANCELLED, ERROR, Target, TargetInfo
from dbench.options import LoadOptions, SamplingOptions
from dbench.progress import RunPhase, RunProgress

log = logging.getLogger(__name__)

EXIT_CODES = {
    "complete": EXIT_OK,
    "timeout": EXIT_FAILED,
    "interrupted": EXIT_INTERRUPTED,
    "server_lost": EXIT_FAILED,
    "stopped": EXIT_FAILED,
}
"""Reason of a run's end -> exit code."""

START_DELAY_S = 0.02
WATCH_PERIOD_S = 0.25
WORKERS_PERIOD_S = 1.0
EXPORT_PATIENCE_S = 60.0
"""Longest silence of a server that hands over its events."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended; what it measured is in its directory."""

    run_dir: Path
    reason: str
    """A key of EXIT_CODES."""
    exit_code: int
    detail: str = ""
    """One line: the rule that stopped it, or the error that ended it."""


async def run_load(
    target: Target,
    load: LoadOptions,
    sampling: SamplingOptions,
    run_dir: Path,
    *,
    on_progress: Callable[[RunProgress], None] | None = None,
    extra_stop: StopRule | None = None,
) -> RunResult:
    """Run one load against a target and leave events.jsonl in `run_dir`, which is made if need be.

    `on_progress` is called about 4 times a second in the event loop and must return at once.
    Cancelled once after the requests are drawn, the run ends as "interrupted": what is in flight is
    cancelled and written down, the events are fetched, and a result is returned; a second cancellation
    ends it there and then. Raises UsageError for options that do not fit the target, ServerUnavailable if
    the target cannot be reached at the start, RunError if `run_dir` holds a run already, RunCutShort if events
    can no longer be written there.
    """
    info = await target.info()
    schedule = draw_schedule(load, sampling, info)
    with EventWriter(run_dir) as event_log:
        run = _Run(target, load, schedule, event_log, _new_tally(load, info, run_dir))
        ending = await run.run(on_progress, extra_stop)
    return RunResult(run_dir, ending.reason, EXIT_CODES[ending.reason], ending.detail)


def _new_tally(load: LoadOptions, info: TargetInfo, run_dir: Path) -> Tally:
    return Tally(
        name=load.name or run_dir.name,
        target=load.server or info.model,
        num_requests=load.num_requests,
        offered_qps=0.0 if load.concurrency is not None else load.qps,
    )


class _Run:
    """The state of one run."""

    def __init__(
        self, target: Target, load: LoadOptions, schedule: Schedule, event_log: EventWriter, tally: Tally
    ) -> None:
        self._target = target
        self._load = load
        self._schedule = schedule
        self._log = event_log
        self._tally = tally
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._deadline_s = math.inf
        self._has_begun = False

    async def run(self, on_progress: Callable[[RunProgress], None] | None, rule: StopRule | None) -> Ending:
        """From the first warm-up request to the last line of the log."""
        self._log.write(self._schedule.drawn)
        flights = Flights(self._target, self._log, self._tally, rule, self._end, self._crash, self._schedule.check_with)
        report = on_progress or _show_nothing
        tasks = [self._start(self._send(flights)), self._start(self._watch(report, rule))]
        if on_progress is not None:
            tasks.append(self._start(self._poll_workers()))
        ending = Ending("interrupted", "an error of dbench itself")
        try:
            ending = await self._until_ended()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await flights.give_up(self._unfinished(ending))
        self._tally.phase = RunPhase.EXPORTING
        report(self._tally.progress())
        ending = await self._export(ending)
        self._log.write(RunEnded(time.monotonic(), "client", ending.reason, ending.detail))
        report(self._tally.progress())
        return ending

    async def _until_ended(self) -> Ending:
        """The first reason to end. Raises the exception of a task that crashed."""
        try:
            return await self._ending
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "outside a task"
            task.uncancel()
            return Ending("interrupted")

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _crash(self, error: BaseException) -> None:
        if not self._ending.done():
            self._ending.set_exception(error)

    async def _send(self, flights: Flights) -> None:
        """Warm-up, then the measured requests, then the tail until someone cancels."""
        self._tally.phase = RunPhase.WARMUP
        self._extend_deadline(time.monotonic())
        try:
            await self._warm_up(flights)
            await self._target.reset_metrics()
        except ServerUnavailable as error:
            self._end(Ending("server_lost", str(error)))
            return
        with punctual():
            start_s = self._begin()
            if self._load.concurrency is None:
                await self._open_loop(flights, start_s)
            else:
                await self._closed_loop(flights, start_s, self._load.concurrency)

    async def _warm_up(self, flights: Flights) -> None:
        """Send all warm-up requests at once and see them end."""
        now_s = time.monotonic()
        tasks = [flights.start(request, WARMUP, now_s) for request in self._schedule.warmup]
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self) -> float:
        """Start the clock; returns t = 0."""
        self._has_begun = True
        start_s = time.monotonic() + START_DELAY_S
        last_s = start_s + self._schedule.measured[-1].offset_s
        is_open_loop = self._load.concurrency is None
        self._tally.begin(start_s, last_s if is_open_loop else None)
        self._extend_deadline(last_s)
        self._log.write(
            RunStarted(
                at_s=start_s,
                source="client",
                unix_s=time.time() + START_DELAY_S,
                schema_version=SCHEMA_VERSION,
                num_requests=self._load.num_requests,
                offered_qps=self._load.qps if is_open_loop else 0.0,
            )
        )
        return start_s

    def _requests(self) -> Iterator[tuple[str, ScheduledRequest]]:
        for scheduled in self._schedule.measured:
            yield MEASURED, scheduled
        for scheduled in self._schedule.tail:
            yield TAIL, scheduled

    async def _open_loop(self, flights: Flights, start_s: float) -> None:
        for role, scheduled in self._requests():
            due_s = start_s + scheduled.offset_s
            await sleep_until(due_s)
            flights.start(scheduled.request, role, due_s)
            await asyncio.sleep(0)  # many may be due at once: let this one leave, and results come in, before the next

    async def _closed_loop(self, flights: Flights, start_s: float, concurrency: int) -> None:
        requests = self._requests()
        await sleep_until(start_s)
        await asyncio.gather(*(self._slot(flights, requests, start_s) for _ in range(concurrency)))

    async def _slot(self, flights: Flights, requests: Iterator[tuple[str, ScheduledRequest]], due_s: float) -> None:
        """One request after the other; the timeout counts from the last measured send so far."""
        for role, scheduled in requests:
            if role == MEASURED:
                self._extend_deadline(due_s)
            task = flights.start(scheduled.request, role, due_s)
            await asyncio.wait((task,))  # and not `await task`, which would pass a cancellation on
            if role == TAIL and not task.result():
                return  # a server that refuses at once would be flooded
            due_s = time.monotonic()

    def _extend_deadline(self, last_arrival_s: float) -> None:
        if self._load.benchmark_timeout > 0:
            self._deadline_s = last_arrival_s + self._load.benchmark_timeout

    async def _watch(self, report: Callable[[RunProgress], None], rule: StopRule | None) -> None:
        """Show the live figures; end the run at its deadline or when the rule says so."""
        while True:
            report(self._tally.progress())
            now_s = time.monotonic()
            if now_s > self._deadline_s:
                self._end(Ending("timeout", f"not final {self._load.benchmark_timeout:g} s after the last arrival"))
            reason = None if rule is None else rule.reason(now_s)
            if reason is not None:
                self._end(Ending("stopped", reason))
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _poll_workers(self) -> None:
        """For the live view alone: whether the server is gone is for the requests to notice."""
        while True:
            try:
                self._tally.workers = await self._target.workers()
            except ServerUnavailable as error:
                log.debug("no worker figures: %s", error)
            await asyncio.sleep(WORKERS_PERIOD_S)

    def _unfinished(self, ending: Ending) -> Unfinished:
        """What the log says of measured requests that have no end of their own."""
        if ending.reason == "timeout":
            return Unfinished(TIMEOUT, ending.detail)
        if ending.reason == "server_lost":
            return Unfinished(ERROR, ending.detail)
        return Unfinished(CANCELLED, ": ".join(filter(None, (f"the run was {ending.reason}", ending.detail))))

    async def _export(self, ending: Ending) -> Ending:
        """Append the target's events; a run that is complete without them has lost its server."""
        if ending.reason == "server_lost" or not self._has_begun:
            return ending  # before the clock starts, the target holds events of others' requests
        try:
            async with asyncio.timeout(EXPORT_PATIENCE_S) as patience:
                async for event in self._target.export_events():
                    self._log.write(event)
                    patience.reschedule(asyncio.get_running_loop().time() + EXPORT_PATIENCE_S)
        except (ServerUnavailable, TimeoutError) as error:
            detail = f"the server's events could not be fetched ({one_line(error)})"
            log.warning("%s", detail)
            return Ending("server_lost", detail) if ending.reason == "complete" else ending
        return ending

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)


def _show_nothing(progress: RunProgress) -> None:
    """For a run without a view."""
