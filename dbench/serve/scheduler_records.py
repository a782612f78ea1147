"""What goes into a scheduler beside calls, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dbench.events import Event
from dbench.serve.finished import Retention
from dbench.serve.validation import RequestLimits
from dbench.serve.wire_link import Command


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
