"""Which rate a capacity search tries next, and when it stops: pure functions of the trials so far.

The order of the trials does not matter, only what they found, so a search that was killed, shared between
processes or given another SLA goes on exactly as one that ran through.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dbench.progress import Verdict
from dbench.search.space import HIGHEST_QPS, LOWEST_QPS, is_within, midpoint, rounded

STEP_FACTOR = 2.0
"""Between the rates of the bracketing phase."""

MAX_INVALID_TRIALS = 3
"""At one rate: the first and two repetitions."""

ANSWERS = (Verdict.PASS, Verdict.FAIL, Verdict.UNJUDGED)
"""Verdicts after which a rate need not be run again."""

_TOO_LOW = LOWEST_QPS * STEP_FACTOR


class StopReason(StrEnum):
    """Why a search ended."""

    BRACKET_CLOSED = "bracket_closed"
    """Highest pass and lowest fail are as close as asked for."""
    CAP_REACHED = "cap_reached"
    MAX_ITERATIONS = "max_iterations"
    NO_PASS_IN_RANGE = "no_pass_in_range"
    INVALID_TRIALS = "invalid_trials"
    """The load generator could not keep its schedule, three times at one rate."""
    LIST_DONE = "list_done"


@dataclass(frozen=True, slots=True)
class Tried:
    """What one finished trial found."""

    qps: float
    verdict: Verdict
    """Any but RUNNING."""
    hopeless: bool = False
    """A fail that no lower rate can turn into a pass."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a search moves; `start_qps` is None only where `qps_list` is given or trials exist."""

    start_qps: float | None
    max_iterations: int = 20
    granularity_pct: float = 2.5
    max_qps_cap: float | None = None
    qps_list: tuple[float, ...] = ()

    @property
    def highest_qps(self) -> float:
        return min(self.max_qps_cap or HIGHEST_QPS, HIGHEST_QPS)


@dataclass(frozen=True, slots=True)
class Try:
    """Run this rate next."""

    qps: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run until another process has finished one of its trials."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The search is over."""

    reason: StopReason


Step = Try | Wait | Stop


@dataclass(frozen=True, slots=True)
class Bracket:
    """What a set of verdicts says about the capacity, which lies between the two."""

    highest_pass: float | None
    """Highest passing rate with no failing rate below it."""
    lowest_fail: float | None
    not_monotone: bool
    """Some rate passed above a rate that failed."""


def bracket_of(trials: Sequence[Tried]) -> Bracket:
    """The bracket that the verdicts leave."""
    fails = [t.qps for t in trials if t.verdict is Verdict.FAIL]
    passes = [t.qps for t in trials if t.verdict is Verdict.PASS]
    lowest_fail = min(fails, default=None)
    below = [q for q in passes if lowest_fail is None or q < lowest_fail]
    return Bracket(max(below, default=None), lowest_fail, len(below) < len(passes))


def next_step(trials: Sequence[Tried], settings: SearchSettings, running: Collection[float] = ()) -> Step:
    """What to do after `trials`, while other processes have trials at the rates `running`."""
    if settings.qps_list:
        return _next_of_list(trials, settings.qps_list, running)
    step = _next_of_search(trials, settings)
    if isinstance(step, Try):
        if _num_invalid(trials, step.qps) >= MAX_INVALID_TRIALS:
            return Stop(StopReason.INVALID_TRIALS)
        if running:
            return Wait()
    return step


def capacity_of(trials: Sequence[Tried], settings: SearchSettings, reason: StopReason) -> float | None:
    """The capacity that a search which stopped for `reason` has found; None if it has found none."""
    if reason in (StopReason.INVALID_TRIALS, StopReason.NO_PASS_IN_RANGE):
        return None
    return bracket_of(in_range(trials, settings)).highest_pass


def _next_of_search(trials: Sequence[Tried], settings: SearchSettings) -> Try | Stop:
    trials = in_range(trials, settings)
    bracket = bracket_of(trials)
    low, high, cap = bracket.highest_pass, bracket.lowest_fail, settings.highest_qps
    if low is not None and high is None and low >= cap:
        return Stop(StopReason.CAP_REACHED)
    if low is not None and high is not None:
        between = midpoint(low, high)
        if is_within(low, high, settings.granularity_pct) or not low < between < high:
            return Stop(StopReason.BRACKET_CLOSED)
    if low is None and high is not None and _is_the_floor(trials, high):
        return Stop(StopReason.NO_PASS_IN_RANGE)
    num_answers = sum(t.verdict in ANSWERS for t in trials)
    if num_answers >= settings.max_iterations:
        return Stop(StopReason.NO_PASS_IN_RANGE if low is None else StopReason.MAX_ITERATIONS)
    if low is not None and high is not None:
        return Try(midpoint(low, high))
    if low is not None:
        return Try(min(rounded(low * STEP_FACTOR), cap))
    if high is not None:
        return Try(rounded(high / STEP_FACTOR))
    assert settings.start_qps is not None, "a search without trials needs a start"
    return Try(min(rounded(settings.start_qps), cap))


def _next_of_list(trials: Sequence[Tried], qps_list: Sequence[float], running: Collection[float]) -> Step:
    answered = {t.qps for t in trials if t.verdict in ANSWERS}
    missing = [q for q in qps_list if q not in answered]
    if not missing:
        judged_any = any(t.verdict in (Verdict.PASS, Verdict.FAIL) for t in trials if t.qps in qps_list)
        nothing_passed = bracket_of([t for t in trials if t.qps in qps_list]).highest_pass is None
        return Stop(StopReason.NO_PASS_IN_RANGE if judged_any and nothing_passed else StopReason.LIST_DONE)
    if any(_num_invalid(trials, q) >= MAX_INVALID_TRIALS for q in missing):
        return Stop(StopReason.INVALID_TRIALS)
    free = [q for q in missing if q not in running]
    return Try(free[0]) if free else Wait()


def in_range(trials: Sequence[Tried], settings: SearchSettings) -> list[Tried]:
    """Trials that this search may rest on: stored ones above its cap are none of its own."""
    if settings.qps_list:
        return [t for t in trials if t.qps in settings.qps_list]
    return [t for t in trials if t.qps <= settings.highest_qps]


def _is_the_floor(trials: Sequence[Tried], lowest_fail: float) -> bool:
    return lowest_fail < _TOO_LOW or any(t.hopeless and t.qps == lowest_fail for t in trials)


def _num_invalid(trials: Sequence[Tried], qps: float) -> int:
    return sum(t.verdict is Verdict.INVALID and t.qps == qps for t in trials)
