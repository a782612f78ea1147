"""Which worker gets a block: tables of pure functions over what the workers have been given.

Nothing here changes anything but RouteState, which its owner hands in. Length = canvas. docs/scheduling.md works
through an example of every route.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the scheduler has given to a worker and not got back."""

    worker_id: int
    outstanding_prefill_tokens: int
    num_requests: int
    length_sum: int
    """Canvas tokens of its blocks."""
    num_free_pages: int = 0
    has_fast_link: bool = False
    """To the worker that refreshes the block in question."""

    @property
    def is_active(self) -> bool:
        return self.num_requests > 0

    @property
    def mean_length(self) -> float:
        """Of an active worker."""
        return self.length_sum / self.num_requests


@dataclass(slots=True)
class RouteState:
    """What a route goes by beside the loads, and remembers between calls; one per table and scheduler."""

    generator: random.Random
    """Breaks ties."""
    slack_ratio: float = 0.10
    """decode_grouping_slack_ratio"""
    topology_alpha: float = 0.0
    """kv_topology_alpha"""
    last_worker_id: int = -1
    """Where round_robin went last."""


Route = Callable[[Sequence[WorkerLoad], int, RouteState], int]
"""(the loads of the workers that may take it, canvas length, state) -> worker id."""


def round_robin(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """The next worker by id after the last one; workers may come and go in between. Mutates `state`."""
    assert loads, "no worker to route to"
    ids = sorted(load.worker_id for load in loads)
    state.last_worker_id = next((i for i in ids if i > state.last_worker_id), ids[0])
    return state.last_worker_id


def least_outstanding_prefill_tokens(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """The worker with the fewest outstanding tokens."""
    return _smallest(loads, lambda load: load.outstanding_prefill_tokens, state)


def least_outstanding_requests(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """The worker with the fewest requests."""
    return _smallest(loads, lambda load: load.num_requests, state)


def least_request_length_sum(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """The worker whose canvases add up to the least."""
    return _smallest(loads, lambda load: load.length_sum, state)


def balanced_length_clustering(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """Among workers of about the least length, the one whose canvases are most like this one; slack 0: the least."""
    if state.slack_ratio == 0:
        return least_request_length_sum(loads, canvas_length, state)
    return _clustered(loads, canvas_length, state)


def balanced_or_round_robin(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """As balanced_length_clustering, but round_robin with slack 0."""
    if state.slack_ratio == 0:
        return round_robin(loads, canvas_length, state)
    return _clustered(loads, canvas_length, state)


def max_free_memory(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """The worker with the most free pages."""
    return _smallest(loads, lambda load: -load.num_free_pages, state)


def topology_guarded_memory(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """The roomiest worker with a fast link, unless it has less than alpha of the pages of the roomiest of all."""
    best = max((load.num_free_pages for load in loads), default=0)
    near = [load for load in loads if load.has_fast_link]
    if near and max(load.num_free_pages for load in near) >= state.topology_alpha * best:
        return max_free_memory(near, canvas_length, state)
    return max_free_memory(loads, canvas_length, state)


def _clustered(loads: Sequence[WorkerLoad], canvas_length: int, state: RouteState) -> int:
    """An idle worker is taken only if no active one is within the slack of the smallest sum with this canvas."""
    assert loads, "no worker to route to"
    limit = (1 + state.slack_ratio) * min(load.length_sum + canvas_length for load in loads)
    within = [load for load in loads if load.length_sum + canvas_length <= limit]
    active = [load for load in within if load.is_active]
    return _smallest(active or within, lambda load: _distance(load, canvas_length), state)


def _distance(load: WorkerLoad, canvas_length: int) -> float:
    """Of a canvas from the mean of the worker's; all idle workers are alike."""
    return abs(load.mean_length - canvas_length) if load.is_active else 0.0


def _smallest(loads: Sequence[WorkerLoad], measure: Callable[[WorkerLoad], float], state: RouteState) -> int:
    """The worker with the smallest measure; the generator in `state` draws among equals."""
    assert loads, "no worker to route to"
    least = min(measure(load) for load in loads)
    ids = sorted(load.worker_id for load in loads if measure(load) == least)
    return ids[0] if len(ids) == 1 else state.generator.choice(ids)


HYBRID_PREFILL_ROUTES: dict[str, Route] = {
    "least_outstanding_prefill_tokens": least_outstanding_prefill_tokens,
    "round_robin": round_robin,
}
"""prefill_scheduler_policy in hybrid mode: over the prefill workers that have room."""

PREFILL_ROUTES: dict[str, Route] = {
    **HYBRID_PREFILL_ROUTES,
    "least_outstanding_requests": least_outstanding_requests,
    "least_request_length_sum": least_request_length_sum,
    "balanced_length_clustering": balanced_length_clustering,
}
"""prefill_scheduler_policy in colocated mode: over all ready workers."""

DECODE_ROUTES: dict[str, Route] = {
    "max_free_memory": max_free_memory,
    "round_robin": round_robin,
    "balanced_length_clustering": balanced_or_round_robin,
    "topology_guarded_memory": topology_guarded_memory,
}
"""decode_scheduler_policy in hybrid mode: over the colocated workers with pages for the canvas."""


FastPairs = frozenset[frozenset[str]]
"""Undirected pairs of device ids."""


def read_fast_pairs(text: str) -> FastPairs:
    """The pairs in '0-1,2-3'. Raises ValueError, in words, for anything else, an empty list included."""
    pairs = [tuple(device.strip() for device in part.split("-")) for part in text.split(",") if part.strip()]
    for pair in pairs:
        if len(pair) != 2 or not all(device.isdecimal() for device in pair):
            raise ValueError(f"{'-'.join(pair)!r} is no pair of device numbers")
        if pair[0] == pair[1]:
            raise ValueError(f"{'-'.join(pair)!r} pairs a device with itself")
    if not pairs:
        raise ValueError("it names no pair")
    return frozenset(frozenset(str(int(device)) for device in pair) for pair in pairs)


def link_id(device: str, worker_id: int) -> str:
    """What fast pairs call the device of a worker: the number of a GPU; on a CPU the worker's own.

    A GPU of another host ('cuda:3 on name') goes by no number: pairs name devices of the server's host.
    """
    return str(worker_id) if device.startswith("cpu") else device.rpartition(":")[2]
