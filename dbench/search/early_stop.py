"""Ends a trial that can no longer pass: going on would cost time and change no verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dbench.load.stop import DoneFact, SentFact
from dbench.metrics import num_unjudged
from dbench.search.sla import Rule
from dbench.search.statistics import is_lost

WATCHED_METRIC = "request_e2e_time"
"""What the load generator sees as it happens; the other metrics come with the server's events, at the end."""


class LostRuleStop:
    """The StopRule of one trial; a pass never stops it."""

    def __init__(self, rules: Sequence[Rule], num_requests: int) -> None:
        self._rules = [rule for rule in rules if rule.metric == WATCHED_METRIC]
        self._first_judged = num_unjudged(num_requests)
        self._num_judged = num_requests - self._first_judged
        self._intended_s: dict[int, float] = {}
        """Of the judged requests in the system."""
        self._ended: list[float] = []
        """Latencies of the judged requests that have ended, inf for failed ones."""

    def sent(self, fact: SentFact) -> None:
        """See StopRule."""
        if fact.index >= self._first_judged:
            self._intended_s[fact.index] = fact.intended_s

    def done(self, fact: DoneFact) -> None:
        """See StopRule."""
        if fact.index >= self._first_judged:
            del self._intended_s[fact.index]
            self._ended.append(fact.latency_s if fact.completed else math.inf)

    def reason(self, now_s: float) -> str | None:
        """See StopRule."""
        seen = [*self._ended, *(now_s - intended_s for intended_s in self._intended_s.values())]
        lost = next((rule for rule in self._rules if is_lost(rule, self._num_judged, seen)), None)
        return None if lost is None else f"{lost.text} is broken for certain"
