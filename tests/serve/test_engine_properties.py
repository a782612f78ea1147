"""The engine under random work: no page, block or token is ever lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.serve.fake_runner import FakeScript, one_to_four
from dbench.serve.policy import QUEUE_ORDERS
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, BlockTask, Fault
from tests.serve.engine_builders import EOS, RANDOM, Rig, make_rig, make_task, quota

NUM_PAGES = 24


@dataclass(frozen=True)
class Workload:
    """Blocks that arrive as the clock passes their arrival, and some that are cancelled at a given step."""

    tasks: tuple[BlockTask, ...]
    max_batch_size: int
    max_tokens_per_iteration: int
    queue_policy: str
    lag_s: float
    eos_offsets: dict[tuple[str, int], int]


@dataclass(frozen=True)
class Troubles:
    """What goes wrong."""

    cancels: dict[int, list[int]]
    """Step -> indices of tasks."""
    failing_launches: frozenset[int]
    failing_collects: frozenset[int]
    non_finite: frozenset[tuple[str, int, int]]


NO_TROUBLES = Troubles({}, frozenset(), frozenset(), frozenset())


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    tasks = []
    for number in range(draw(st.integers(1, 9))):
        masks = 4 * draw(st.integers(1, 4))
        tasks.append(
            make_task(
                f"r{number}",
                prompt=draw(st.integers(1, NUM_PAGES * 4 - masks)),
                masks=masks,
                sampling=draw(st.sampled_from([RANDOM, quota(1), quota(2), quota(3)])),
                request_seed=draw(st.integers(-(2**63), 2**63 - 1)),
                ignore_eos=draw(st.booleans()),
                arrival_s=float(draw(st.integers(0, 12))),
                num_remaining_blocks=masks // 4,
                alone=draw(st.integers(0, 4)) == 0,
            )
        )
    return Workload(
        tasks=tuple(sorted(tasks, key=lambda task: task.arrival_s)),
        max_batch_size=draw(st.integers(1, 4)),
        max_tokens_per_iteration=draw(st.integers(1, 80)),
        queue_policy=draw(st.sampled_from(sorted(QUEUE_ORDERS))),
        lag_s=draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])),
        eos_offsets=draw(st.dictionaries(st.sampled_from([(t.key.request_id, 0) for t in tasks]), st.integers(0, 3))),
    )


@st.composite
def troubles(draw: st.DrawFn) -> Troubles:
    numbers = st.frozensets(st.integers(0, 25), max_size=3)
    places = st.tuples(st.sampled_from([f"r{n}" for n in range(9)]), st.just(0), st.integers(0, 3))
    cancels = draw(st.dictionaries(st.integers(0, 25), st.lists(st.integers(0, 8), max_size=3), max_size=5))
    return Troubles(cancels, draw(numbers), draw(numbers), draw(st.frozensets(places, max_size=3)))


def make_rig_for(work: Workload, trouble: Troubles, *, overlap: bool) -> Rig:
    script = FakeScript(
        num_unmasked=one_to_four,
        eos_token_ids=(EOS,),
        eos_offsets=work.eos_offsets,
        non_finite=trouble.non_finite,
        failing_launches=trouble.failing_launches,
        failing_collects=trouble.failing_collects,
        lag_s=work.lag_s,
        row_s=0.001,
    )
    return make_rig(
        script,
        num_pages=NUM_PAGES,
        overlap=overlap,
        max_batch_size=work.max_batch_size,
        max_tokens_per_iteration=work.max_tokens_per_iteration,
        queue_policy=work.queue_policy,
    )


def run(work: Workload, *, overlap: bool, trouble: Troubles = NO_TROUBLES) -> Rig:
    """Run all to the end, holding the engine to what must be true after every step."""
    rig = make_rig_for(work, trouble, overlap=overlap)
    order = QUEUE_ORDERS[work.queue_policy]
    to_come = list(work.tasks)
    waiting: dict[BlockKey, BlockTask] = {}
    for step in range(5000):
        while to_come and to_come[0].arrival_s <= rig.clock():
            task = to_come.pop(0)
            rig.engine.submit(task)
            waiting[task.key] = task
        for index in trouble.cancels.get(step, []):
            if index < len(work.tasks):
                rig.engine.cancel(work.tasks[index].key)
                waiting.pop(work.tasks[index].key, None)
        num_attached = len(rig.runner.attached)
        goes_on = rig.step()
        for task in rig.runner.attached[num_attached:]:
            assert task is min(waiting.values(), key=order), f"{task.key} overtook the head of the line"
            del waiting[task.key]
        rig.pages.check()
        assert len(rig.runner.slots) <= work.max_batch_size
        if not goes_on:
            if not to_come:
                return rig
            rig.clock.wait_until(to_come[0].arrival_s)
    raise AssertionError("not idle after 5000 steps")


def content(end: BlockEnd) -> tuple[object, ...]:
    """What may not depend on the driver: all but the times."""
    return end.outcome, end.token_ids, end.found_eos, [step.num_unmasked for step in end.steps]


def submitted(work: Workload) -> set[BlockKey]:
    return {task.key for task in work.tasks}


@settings(max_examples=60, deadline=None)
@given(workloads(), st.booleans())
def test_every_block_is_done_exactly_once_with_all_its_tokens(work: Workload, overlap: bool) -> None:
    rig = run(work, overlap=overlap)
    assert rig.ends.keys() == submitted(work)
    for task in work.tasks:
        end = rig.ends[task.key]
        assert end.outcome is BlockOutcome.DONE
        assert sum(step.num_unmasked for step in end.steps) == len(end.token_ids)
        assert 1 <= len(end.steps) <= task.block_length
        assert len(end.token_ids) == task.block_length or end.found_eos
        assert end.found_eos == (EOS in end.token_ids and not task.ignore_eos)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from([0.0, 0.3, 1.0, 5.0]))
def test_overlap_gives_the_ids_and_steps_of_the_plain_driver(work: Workload, other_lag_s: float) -> None:
    plain = run(work, overlap=False)
    overlapping = run(replace(work, lag_s=other_lag_s), overlap=True)
    assert {k: content(e) for k, e in plain.ends.items()} == {k: content(e) for k, e in overlapping.ends.items()}


@settings(max_examples=60, deadline=None)
@given(workloads(), st.booleans())
def test_under_arrival_order_every_block_ends_within_a_bound_that_its_place_in_the_queue_sets(
    work: Workload, overlap: bool
) -> None:
    """Blocks of L positions run for at most L steps; the driver may see an end one iteration late, after a void span.

    So those that run when a block becomes the first to wait have all ended L + 2 iterations later, if nothing else
    has let it in before; then it goes alone. With k blocks before it, it has ended after (k + 2) (L + 2) iterations:
    those that run, those k, and itself.
    """
    rig = make_rig_for(replace(work, queue_policy="arrival_order"), NO_TROUBLES, overlap=overlap)
    to_come, steps, bounds = list(work.tasks), 0, {}
    while to_come or not rig.engine.is_idle:
        while to_come and (to_come[0].arrival_s <= rig.clock() or rig.engine.is_idle):
            task = to_come.pop(0)
            bounds[task.key] = steps + (len(rig.engine.waiting) + 2) * (task.block_length + 2)
            rig.engine.submit(task)
        rig.step()
        steps += 1
        late = [key for key, bound in bounds.items() if steps > bound and key not in rig.ends]
        assert not late, f"{late[0]} has not ended after {steps} iterations"
    assert rig.ends.keys() == submitted(work)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.booleans())
def test_the_deficit_stays_below_the_longest_canvas(work: Workload, overlap: bool) -> None:
    longest = max(task.canvas_length for task in work.tasks)
    deficits = [state.deficit_tokens for state in run(work, overlap=overlap).states]
    assert 0 <= min(deficits) <= max(deficits) < longest
    assert deficits[-1] == 0


@settings(max_examples=60, deadline=None)
@given(workloads(), troubles(), st.booleans())
def test_cancels_and_failures_at_any_moment_lose_neither_blocks_nor_pages(
    work: Workload, trouble: Troubles, overlap: bool
) -> None:
    rig = run(work, overlap=overlap, trouble=trouble)
    assert rig.ends.keys() == submitted(work)
    assert rig.pages.num_free == NUM_PAGES
    assert rig.runner.slots == {}
    for end in rig.ends.values():
        assert (end.error != "") == (end.fault is not Fault.NONE) == (end.outcome is BlockOutcome.FAILED)
        assert (end.token_ids != ()) == (end.outcome is BlockOutcome.DONE)
    last = rig.states[-1]
    assert (last.state, last.pages_used, last.outstanding_prefill_tokens, last.decode_length_sum) == ("idle", 0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(workloads(), troubles())
def test_what_survives_troubles_has_the_tokens_of_an_untroubled_run(work: Workload, trouble: Troubles) -> None:
    calm = run(work, overlap=False)
    for key, end in run(work, overlap=True, trouble=trouble).ends.items():
        if end.outcome is BlockOutcome.DONE:
            assert content(end) == content(calm.ends[key])


@settings(max_examples=60, deadline=None)
@given(workloads(), st.booleans())
def test_batches_add_up_to_the_steps_of_the_blocks_and_the_void_rows(work: Workload, overlap: bool) -> None:
    rig = run(work, overlap=overlap)
    refresh_rows = sum(batch.batch_prompt_len for batch in rig.batches)
    decode_rows = sum(batch.batch_gen_len - batch.batch_num_void_tokens for batch in rig.batches)
    assert refresh_rows == sum(task.canvas_length for task in work.tasks)
    assert decode_rows == sum((len(end.steps) - 1) * 4 for end in rig.ends.values())
    assert overlap or all(batch.batch_num_void_tokens == 0 for batch in rig.batches)
    ends = [batch.at_s for batch in rig.batches]
    starts = [batch.start_s for batch in rig.batches]
    assert all(start >= before for start, before in zip(starts[1:], ends[:-1], strict=True))
