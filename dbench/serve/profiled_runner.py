"""A Runner that lets torch's profiler watch some of its batches, and writes what it saw as a trace."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch.profiler import profile

from dbench.serve.kv import KvRunner, PageStore
from dbench.serve.runner import LayerWatcher, Span, StepResult, Ticket
from dbench.serve.sequence import BlockTask

FIRST_BATCH = 100
NUM_BATCHES = 50
"""By then a server under load has found its pace; more batches make a trace that is slow to open."""

logger = logging.getLogger(__name__)


class ProfiledRunner:
    """Passes everything on. Batches FIRST_BATCH to FIRST_BATCH + NUM_BATCHES - 1 are profiled, or those until close."""

    def __init__(self, runner: KvRunner, folder: Path, device: str) -> None:
        self._runner = runner
        self._path = folder / f"{device.replace(':', '-')}.trace.json.gz"
        self._num_launched = 0
        self._profile: profile | None = None

    @property
    def kv(self) -> PageStore:
        return self._runner.kv

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None:
        self._runner.attach(slot, task, pages, fixed)

    def watch_layers(self, watcher: LayerWatcher) -> None:
        self._runner.watch_layers(watcher)

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        if self._num_launched == FIRST_BATCH:
            self._profile = profile()
            self._profile.start()
        elif self._num_launched == FIRST_BATCH + NUM_BATCHES:
            self._write()
        self._num_launched += 1
        return self._runner.launch(spans)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._runner.collect(ticket)

    def detach(self, slot: int) -> None:
        self._runner.detach(slot)

    def close(self) -> None:
        self._write()
        self._runner.close()

    def _write(self) -> None:
        """End the profile, if one runs; a trace that cannot be written is a line in the log."""
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            logger.error("%s: the trace cannot be written: %s", self._path, error)
        else:
            logger.info("profile of %d batches: %s", self._num_launched - FIRST_BATCH, self._path)
