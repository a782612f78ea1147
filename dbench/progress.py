"""Snapshots for live views: what `serve`, `run` and `search-capacity` show while they work.

Producers fill them, `console.py` draws them; neither knows the other. Rates are per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """One row of the worker table. Counters run from the worker's start; views difference them."""

    worker_id: int
    device: str
    state: str
    """awaited (from another host), starting, idle, queued, busy, draining, ended or lost."""
    queue_depth_waiting: int
    queue_depth_active: int
    pages_used: int
    pages_total: int
    num_forward_passes: int
    """Steps of sequences, refreshes included, void spans not."""
    num_unmasked_tokens: int
    """Returned tokens."""
    num_losses: int = 0
    """Times that it was lost, whether or not it came back."""


class ServerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "no worker ready"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ServeProgress:
    """A server at one moment."""

    address: str
    model: str
    state: ServerState
    uptime_s: float
    num_in_server: int
    num_pending: int
    num_completed: int
    num_failed: int
    num_cancelled: int
    workers: tuple[WorkerProgress, ...]
    recent_errors: tuple[str, ...]


class RunPhase(StrEnum):
    STARTING = "starting"
    WARMUP = "warm-up"
    MEASURING = "measuring"
    DRAINING = "draining"
    EXPORTING = "exporting"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A run at one moment; percentiles are over the measured requests that have completed."""

    name: str
    target: str
    phase: RunPhase
    elapsed_s: float
    eta_s: float | None
    num_requests: int
    num_sent: int
    num_completed: int
    num_failed: int
    in_flight: int
    offered_qps: float
    achieved_qps: float
    latency_p50_s: float | None
    latency_p90_s: float | None
    latency_p99_s: float | None
    lag_p99_s: float | None
    workers: tuple[WorkerProgress, ...]
    recent_errors: tuple[str, ...]


class Verdict(StrEnum):
    RUNNING = "running"
    PASS = "pass"
    FAIL = "fail"
    INVALID = "invalid"
    UNJUDGED = "unjudged"
    """Finished, and there is no SLA to judge it by."""
    UNDECIDED = "undecided"
    """Stopped early under another SLA, before it could answer this one."""


@dataclass(frozen=True, slots=True)
class RuleProgress:
    """One SLA rule in one trial."""

    rule: str
    value: float | None
    threshold: float
    unit: str
    """'s' for a time, else nothing."""
    passed: bool | None
    margin: float | None
    """How far the value is on the good side of the limit, as a share of it; absolute where the limit is 0."""


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """One row of the trial table."""

    number: int
    qps: float
    verdict: Verdict
    rules: tuple[RuleProgress, ...]
    reason: str
    cached: bool


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """A capacity search at one moment."""

    job: str
    rules: tuple[str, ...]
    elapsed_s: float
    max_iterations: int
    trials: tuple[TrialProgress, ...]
    highest_pass: float | None
    lowest_fail: float | None
    running: RunProgress | None


Progress: TypeAlias = ServeProgress | RunProgress | SearchProgress
