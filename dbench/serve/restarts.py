"""Lost local workers are started again, each under its old number, with growing pauses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dbench.errors import ServerStartError
from dbench.serve.hub import Hub
from dbench.serve.local_workers import LocalWorker, LocalWorkers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BackOff:
    """The pauses before the starts of one worker: 1, 2, 4 ... 30 s."""

    first_s: float = 1.0
    longest_s: float = 30.0
    steady_s: float = 60.0
    """A worker that was ready for so long before its loss begins with the first pause again."""
    max_failed_starts: int = 5
    """In a row, without having been ready."""
    num_failed_starts: int = 0
    num_pauses: int = 0
    """Since it was steady."""

    def pause_s(self, ready_for_s: float | None) -> float | None:
        """Seconds to wait after a loss; None: enough. `ready_for_s`: how long it had been ready, None for never."""
        if ready_for_s is None:
            self.num_failed_starts += 1
            if self.num_failed_starts >= self.max_failed_starts:
                return None
        else:
            self.num_failed_starts = 0
            if ready_for_s >= self.steady_s:
                self.num_pauses = 0
        self.num_pauses += 1
        return min(self.longest_s, self.first_s * 2.0 ** min(self.num_pauses - 1, 60))


class Restarts:
    """From `start` to `stop`, what a lost local worker held waits for its next process."""

    def __init__(
        self, hub: Hub, local: LocalWorkers, startup_timeout_s: float, back_off: Callable[[], BackOff] = BackOff
    ) -> None:
        self._hub = hub
        self._local = local
        self._startup_timeout_s = startup_timeout_s
        self._back_off = back_off
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """To be called when all workers are ready; the task ends after `stop`, and must not be cancelled."""
        self._hub.await_lost_workers(is_on=True)
        self._task = asyncio.create_task(self._run())
        return self._task

    async def stop(self) -> None:
        """Return when nothing is being started any more; a second call does nothing."""
        self._hub.await_lost_workers(is_on=False)
        self._stopped.set()
        self._hub.announce()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        await asyncio.gather(*(self._tend(worker) for worker in self._local.workers))
        await self._stopped.wait()

    async def _tend(self, worker: LocalWorker) -> None:
        back_off = self._back_off()
        while await self._is_lost(worker):
            await self._local.kill_one(worker)  # a worker whose stream is lost may live on, or hang
            pause_s = back_off.pause_s(self._hub.ready_for_s(worker.worker_id))
            if pause_s is None:
                reason = self._hub.fatal_errors.get(worker.worker_id) or worker.last_line or worker.ending
                self._hub.give_up(
                    worker.worker_id,
                    f"could not be started again {back_off.num_failed_starts} times in a row: {reason}",
                )
                return
            logger.warning("worker %d is started again in %g s", worker.worker_id, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), pause_s)
            if not self._stopped.is_set():
                await self._start(worker)

    async def _start(self, worker: LocalWorker) -> None:
        """Return when it is ready, or lost again."""
        worker_id = worker.worker_id
        self._hub.worker_starts(worker_id)
        try:
            await self._local.start_one(worker)
            await asyncio.wait_for(self._no_longer_starts(worker_id), self._startup_timeout_s)
        except ServerStartError as error:
            self._hub.worker_gone(worker_id, str(error))
        except TimeoutError:
            self._hub.worker_gone(worker_id, f"it was not ready within startup_timeout_s {self._startup_timeout_s:g}")

    async def _is_lost(self, worker: LocalWorker) -> bool:
        """Wait for its loss; False when the restarts are stopped before."""
        await self._hub.until_news(lambda: self._stopped.is_set() or self._hub.is_awaited(worker.worker_id))
        return not self._stopped.is_set()

    async def _no_longer_starts(self, worker_id: int) -> None:
        await self._hub.until_news(lambda: self._stopped.is_set() or not self._hub.is_starting(worker_id))
