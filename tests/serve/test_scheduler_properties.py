"""Whatever workers and clients do: every request ends exactly once, and no load is left behind."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.errors import QueueFullError, ServerUnavailable
from dbench.events import BlockFinished, BlockRouted, RequestArrived, RequestFinished, SchedulerDepth
from dbench.serve.fleet import WorkerPhase
from dbench.serve.routes import PREFILL_ROUTES
from dbench.serve.sequence import BlockTask, Fault
from dbench.serve.wire_link import RunBlock
from tests.serve.scheduler_builders import BLOCK, Rig, cancelled, done, failed, rules

NUM_WORKERS = 3
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("ready"), st.integers(0, NUM_WORKERS - 1), st.just(0)),
    st.tuples(st.sampled_from(["lose", "restart", "give up"]), st.integers(0, NUM_WORKERS - 1), st.just(0)),
    st.tuples(
        st.sampled_from(["done", "eos", "own fault", "batch failed", "dropped", "refreshed"]),
        st.integers(0, 50),
        st.integers(0, 2),
    ),
)


def play(rig: Rig, what: str, a: int, b: int, sent: list[tuple[int, BlockTask]]) -> None:
    """One step; ends may name any block ever sent, from its own worker or (b > 0) from another."""
    phase = {worker_id: rig.fleet[worker_id].phase for worker_id in range(NUM_WORKERS)}
    match what:
        case "submit":
            try:
                rig.submit((1,) * a, b * BLOCK)
            except (QueueFullError, ServerUnavailable):
                return
        case "cancel":
            rig.cancel(f"r{a}")
        case "ready" if phase[a] is WorkerPhase.STARTING:
            rig.ready(a)
        case "lose":
            rig.lose(a)
        case "restart" if phase[a] is WorkerPhase.AWAITED:
            rig.restart(a)
        case "give up" if phase[a] is WorkerPhase.AWAITED:
            rig.give_up(a)
        case "done" | "eos" | "own fault" | "batch failed" | "dropped" | "refreshed" if sent:
            worker_id, task = sent[a % len(sent)]
            worker_id = (worker_id + b) % NUM_WORKERS
            if phase[worker_id] is not WorkerPhase.READY:
                return
            if what == "refreshed":
                rig.progress(worker_id, refreshed=(task.key,))
                return
            ends = {
                "done": done(task, tuple(range(BLOCK))),
                "eos": done(task, (5, 99), found_eos=True),
                "own fault": failed(task, fault=Fault.OWN),
                "batch failed": failed(task),
                "dropped": cancelled(task),
            }
            rig.progress(worker_id, ends[what])


def check(rig: Rig) -> None:
    """What holds at every moment."""
    held: Counter[str] = Counter()
    for worker in rig.fleet.workers.values():
        assert worker.length_sum == sum(a.canvas_length for a in worker.assignments.values())
        if worker.phase is not WorkerPhase.READY:
            assert not worker.assignments
        held.update(key.request_id for key in worker.assignments)
    if rig.fleet.in_phase(WorkerPhase.READY):
        assert rig.scheduler.num_pending == 0
    arrived, ended = len(rig.of(RequestArrived)), len(rig.of(RequestFinished))
    assert rig.scheduler.num_in_server == arrived - ended


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60), st.sampled_from(sorted(PREFILL_ROUTES)), st.integers(0, 2), st.booleans())
def test_every_request_ends_exactly_once_and_loads_return_to_zero(
    steps: list[tuple[str, int, int]], policy: str, retries: int, awaits_lost: bool
) -> None:
    rig = Rig(NUM_WORKERS, rules(retries=retries, queued=12), policy, ready=False)
    rig.fleet.awaits_lost = awaits_lost
    for what, a, b in steps:
        rig.now_s += 1.0
        play(rig, what, a, b, list(rig.tasks()))
        check(rig)
    drain(rig)
    ids = [event.request_id for event in rig.of(RequestArrived)]
    final = [event.request_id for event in rig.of(RequestFinished)]
    assert sorted(ids) == sorted(final)
    assert rig.scheduler.num_in_server == rig.scheduler.num_pending == 0
    assert sum(rig.scheduler.num_by_status.values()) == len(ids)
    assert all(worker.length_sum == 0 and not worker.assignments for worker in rig.fleet.workers.values())
    depths = rig.of(SchedulerDepth)
    assert not depths or (depths[-1].pending_requests, depths[-1].pending_prefill_tokens) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(st.lists(STEPS, max_size=60), st.booleans())
def test_every_routed_attempt_is_new_and_ends_once(steps: list[tuple[str, int, int]], awaits_lost: bool) -> None:
    rig = Rig(NUM_WORKERS, rules(queued=12), ready=False)
    rig.fleet.awaits_lost = awaits_lost
    for what, a, b in steps:
        play(rig, what, a, b, list(rig.tasks()))
    drain(rig)
    routed = [(e.request_id, e.block_index, e.attempt) for e in rig.of(BlockRouted)]
    ended = [(e.request_id, e.block_index, e.attempt) for e in rig.of(BlockFinished)]
    assert len(set(routed)) == len(routed)
    assert sorted(routed) == sorted(ended)
    for _, task in rig.tasks():
        assert task.key.attempt <= (3 if task.alone else 2)


def drain(rig: Rig) -> None:
    """Answer every block that a worker still holds, and let the last workers come or go."""
    for worker_id, worker in rig.fleet.workers.items():
        if worker.phase is WorkerPhase.STARTING:
            rig.lose(worker_id)
        if worker.phase is WorkerPhase.AWAITED:
            rig.give_up(worker_id)
    while held := [(w.worker_id, key) for w in rig.fleet.workers.values() for key in w.assignments]:
        tasks = {c.task.key: c.task for _, c in rig.commands if isinstance(c, RunBlock)}
        for worker_id, key in held:
            rig.progress(worker_id, done(tasks[key], tuple(range(BLOCK))))
