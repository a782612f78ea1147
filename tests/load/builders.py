"""Small loads, targets and runs for the tests of the load generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dbench.event_file import read_events
from dbench.events import Event, RequestSent
from dbench.load.driver import RunResult, run_load
from dbench.load.fake_target import FAKE_INFO
from dbench.load.stop import StopRule
from dbench.load.target import LoadRequest, SamplingParameters, Target, TargetInfo
from dbench.options import LoadOptions, SamplingOptions
from dbench.progress import RunProgress

E = TypeVar("E", bound=Event)


def small_load(**options: Any) -> LoadOptions:
    """A few short requests, fast, without warm-up."""
    few = LoadOptions(qps=200.0, num_requests=8, num_warmup_requests=0, prompt_tokens=16, gen_tokens=32)
    return replace(few, **options)


def some_info(**fields: Any) -> TargetInfo:
    return replace(FAKE_INFO, **fields)


def one_request(index: int = 0, gen_length: int = 64) -> LoadRequest:
    return LoadRequest(index, (5, 6, 7), gen_length, SamplingParameters().with_defaults(), 11, True)


@dataclass(frozen=True, slots=True)
class Ran:
    """A run and what it left."""

    result: RunResult
    events: tuple[Event, ...]

    def of(self, kind: type[E], keep: Callable[[E], bool] = lambda event: True) -> list[E]:
        return [event for event in self.events if isinstance(event, kind) and keep(event)]


def run(
    target: Target,
    load: LoadOptions,
    run_dir: Path,
    *,
    on_progress: Callable[[RunProgress], None] | None = None,
    extra_stop: StopRule | None = None,
) -> Ran:
    """Run to the end and read the log."""
    result = asyncio.run(
        run_load(target, load, SamplingOptions(), run_dir, on_progress=on_progress, extra_stop=extra_stop)
    )
    return Ran(result, events_of(run_dir))


def events_of(run_dir: Path) -> tuple[Event, ...]:
    with (run_dir / "events.jsonl").open() as lines:
        return tuple(read_events(lines))


def indices(events: Iterable[RequestSent]) -> list[int]:
    return [event.index for event in events]
