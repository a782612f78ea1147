"""Who gets a block: a worker that does all of it, or one that refreshes it and one that decodes it.

A placer chooses, by a route of routes.py, among the workers that may take the block; what it gave stands in
the workers' accounts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dbench.options import COLOCATED, HYBRID, PREFILL, EngineOptions
from dbench.serve.fleet import Fleet, Pin, Worker, WorkerPhase
from dbench.serve.policy import choose
from dbench.serve.routes import (
    DECODE_ROUTES,
    HYBRID_PREFILL_ROUTES,
    PREFILL_ROUTES,
    FastPairs,
    Route,
    RouteState,
    WorkerLoad,
    least_outstanding_prefill_tokens,
    link_id,
    read_fast_pairs,
)
from dbench.serve.tracking import TrackedRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a block."""

    refresher: Worker
    decoder: Worker | None
    """The refresher itself where one worker does all. None: nobody has room yet, or nothing will be left to decode."""

    @property
    def is_split(self) -> bool:
        return self.decoder is not self.refresher


class Placer(Protocol):
    """What differs between the serving modes when a block finds its workers."""

    def place(self, tracked: TrackedRequest, *, others_wait: bool) -> Placement | None:
        """Who takes the request's next block; None: it stays pending, and with it those behind it.

        `others_wait`: refreshed blocks wait for somebody who decodes them.
        """

    def decoder_for(self, tracked: TrackedRequest, refresher: Worker) -> Worker | None:
        """Who decodes a block that `refresher` refreshes; None: nobody has room."""

    def request_ended(self, tracked: TrackedRequest) -> None:
        """Its final status is set."""


class ColocatedPlacer:
    """Every worker takes whole blocks, whatever it holds already."""

    def __init__(self, fleet: Fleet, route: Route, state: RouteState, *, sticky: bool = False) -> None:
        self._fleet = fleet
        self._route = route
        self._state = state
        self._sticky = sticky

    def place(self, tracked: TrackedRequest, *, others_wait: bool) -> Placement | None:
        pinned = self._pinned(tracked)
        if pinned is not None:
            return Placement(pinned, pinned)
        candidates = _without(self._fleet.in_phase(WorkerPhase.READY), tracked.avoid_worker_id)
        if not candidates:
            return None
        canvas = tracked.shape.canvas_length
        worker = self._fleet[self._route([worker.load() for worker in candidates], canvas, self._state)]
        if self._sticky:
            worker.pin(tracked.request.request_id, Pin(tracked.shape.num_blocks * canvas, canvas))
            tracked.pinned_to = worker.worker_id
        return Placement(worker, worker)

    def decoder_for(self, tracked: TrackedRequest, refresher: Worker) -> Worker | None:
        raise AssertionError("in colocated mode a block's worker decodes it")

    def request_ended(self, tracked: TrackedRequest) -> None:
        self._unpin(tracked)

    def _pinned(self, tracked: TrackedRequest) -> Worker | None:
        """The request's worker; one that is lost loses the pin."""
        if tracked.pinned_to is None:
            return None
        worker = self._fleet[tracked.pinned_to]
        if worker.phase is WorkerPhase.READY:
            return worker
        self._unpin(tracked)
        return None

    def _unpin(self, tracked: TrackedRequest) -> None:
        if tracked.pinned_to is not None:
            self._fleet[tracked.pinned_to].unpin(tracked.request.request_id)
            tracked.pinned_to = None


@dataclass(frozen=True, slots=True)
class HybridRules:
    """How hybrid mode chooses."""

    prefill_route: Route
    prefill_state: RouteState
    decode_route: Route
    decode_state: RouteState
    overflow: bool
    overload_threshold: int
    """Outstanding prefill tokens from which on a worker gets no refresh."""
    fast_pairs: FastPairs = frozenset()


class HybridPlacer:
    """Prefill workers refresh, colocated workers decode; these refresh too while all of those are overloaded."""

    def __init__(self, fleet: Fleet, rules: HybridRules) -> None:
        self._fleet = fleet
        self._rules = rules

    def place(self, tracked: TrackedRequest, *, others_wait: bool) -> Placement | None:
        rules, canvas = self._rules, tracked.shape.canvas_length
        too_small = self._too_small(canvas)
        if too_small is not None:
            return Placement(too_small, too_small)
        refreshers = self._with_room(PREFILL, tracked)
        if refreshers:
            loads = [worker.load() for worker in refreshers]
            refresher = self._fleet[rules.prefill_route(loads, canvas, rules.prefill_state)]
            is_over_soon = tracked.request.sampling.fewest_per_step >= tracked.shape.block_length
            # whoever waits for a decoder already comes first
            decoder = None if others_wait or is_over_soon else self.decoder_for(tracked, refresher)
            return Placement(refresher, decoder)
        if not rules.overflow or others_wait:
            return None
        loads = [worker.load() for worker in self._with_room(COLOCATED, tracked)]
        if not loads:
            return None
        worker = self._fleet[least_outstanding_prefill_tokens(loads, canvas, rules.prefill_state)]
        return Placement(worker, worker)

    def decoder_for(self, tracked: TrackedRequest, refresher: Worker) -> Worker | None:
        canvas = tracked.shape.canvas_length
        roomy = [worker for worker in self._fleet.ready(COLOCATED) if worker.has_pages_for(canvas)]
        loads = [self._load_near(worker, refresher) for worker in _without(roomy, tracked.avoid_worker_id)]
        if not loads:
            return None
        return self._fleet[self._rules.decode_route(loads, canvas, self._rules.decode_state)]

    def request_ended(self, tracked: TrackedRequest) -> None:
        """Nothing is kept for a whole request."""

    def _too_small(self, canvas_length: int) -> Worker | None:
        """A worker to say that its kind can never hold such a canvas, which would wait for ever, and others behind it;
        None while one may come that can.
        """
        kinds = (COLOCATED,) if self._rules.overflow else (PREFILL, COLOCATED)
        for kind in kinds:
            ready = self._fleet.ready(kind)
            if ready and not any(worker.can_ever_hold(canvas_length) for worker in self._fleet.of_kind(kind)):
                return ready[0]
        return None

    def _with_room(self, kind: str, tracked: TrackedRequest) -> list[Worker]:
        """Ready workers of a kind that are not overloaded and have pages for the canvas."""
        roomy = [
            worker
            for worker in self._fleet.ready(kind)
            if worker.outstanding_prefill_tokens < self._rules.overload_threshold
            and worker.has_pages_for(tracked.shape.canvas_length)
        ]
        return _without(roomy, tracked.avoid_worker_id)

    def _load_near(self, worker: Worker, refresher: Worker) -> WorkerLoad:
        pair = frozenset(link_id(end.device, end.worker_id) for end in (worker, refresher))
        return worker.load(has_fast_link=pair in self._rules.fast_pairs)


def _without(workers: Sequence[Worker], avoid: int | None) -> list[Worker]:
    """All but one to avoid, unless nobody else is there."""
    others = [worker for worker in workers if worker.worker_id != avoid]
    return others or list(workers)


def _colocated(options: EngineOptions, fleet: Fleet) -> Placer:
    route = choose("prefill_scheduler_policy", PREFILL_ROUTES, options.prefill_scheduler_policy)
    state = RouteState(random.Random(options.server_seed), slack_ratio=options.decode_grouping_slack_ratio)
    return ColocatedPlacer(fleet, route, state, sticky=options.colocated_sticky_worker)


def _hybrid(options: EngineOptions, fleet: Fleet) -> Placer:
    rules = HybridRules(
        prefill_route=choose("prefill_scheduler_policy", HYBRID_PREFILL_ROUTES, options.prefill_scheduler_policy),
        prefill_state=RouteState(random.Random(options.server_seed)),
        decode_route=choose("decode_scheduler_policy", DECODE_ROUTES, options.decode_scheduler_policy),
        decode_state=RouteState(
            random.Random(options.server_seed + 1),
            slack_ratio=options.decode_grouping_slack_ratio,
            topology_alpha=options.kv_topology_alpha,
        ),
        overflow=options.enable_hybrid_prefill_overflow,
        overload_threshold=options.prefill_overload_threshold,
        fast_pairs=read_fast_pairs(options.kv_fast_pairs),
    )
    return HybridPlacer(fleet, rules)


PLACERS: dict[str, Callable[[EngineOptions, Fleet], Placer]] = {COLOCATED: _colocated, HYBRID: _hybrid}
"""mode -> what places blocks, from the options, over a fleet."""
