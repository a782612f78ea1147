"""A worker's trace: some of its batches, on disk when it ends."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from dbench.serve.kv import PageStore
from dbench.serve.profiled_runner import FIRST_BATCH, NUM_BATCHES, ProfiledRunner
from dbench.serve.runner import LayerWatcher, Span, StepResult, Ticket
from dbench.serve.sequence import BlockTask


class IdleRunner:
    """Computes nothing."""

    @property
    def kv(self) -> PageStore:
        raise AssertionError("nobody asks for its pages")

    def attach(
        self, slot: int, task: BlockTask, pages: tuple[int, ...], fixed: Mapping[int, int] | None = None
    ) -> None: ...

    def launch(self, spans: tuple[Span, ...]) -> Ticket:
        return Ticket(0)

    def collect(self, ticket: Ticket) -> StepResult:
        return StepResult((), 0.0, 0.0, 0.0)

    def detach(self, slot: int) -> None: ...

    def watch_layers(self, watcher: LayerWatcher) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("num_batches", [FIRST_BATCH + 1, FIRST_BATCH + NUM_BATCHES + 5])
def test_the_trace_is_there_however_early_the_worker_ends(tmp_path: Path, num_batches: int) -> None:
    runner = ProfiledRunner(IdleRunner(), tmp_path / "traces", "cuda:0")
    for _ in range(num_batches):
        runner.collect(runner.launch(()))
    runner.close()
    with gzip.open(tmp_path / "traces" / "cuda-0.trace.json.gz", "rt", encoding="utf-8") as file:
        assert "traceEvents" in json.load(file)


def test_a_worker_that_did_little_writes_none(tmp_path: Path) -> None:
    runner = ProfiledRunner(IdleRunner(), tmp_path, "cpu")
    runner.collect(runner.launch(()))
    runner.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    runner = ProfiledRunner(IdleRunner(), tmp_path / "file", "cpu")
    with caplog.at_level(logging.ERROR):
        for _ in range(FIRST_BATCH + 1):
            runner.collect(runner.launch(()))
        runner.close()
    assert "the trace cannot be written" in caplog.text
