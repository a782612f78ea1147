"""Hybrid mode under random work and random troubles: the tokens of colocated mode, and nothing is ever lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.serve.fake_runner import FakeScript, one_to_four
from dbench.serve.wire import Submission
from tests.serve.engine_builders import EOS, RANDOM, quota
from tests.serve.hybrid_world import World
from tests.serve.scheduler_builders import BLOCK, MASK_ID, Hybrid

NUM_PAGES = 16


@dataclass(frozen=True)
class Setup:
    """Workers and what they are asked."""

    hybrid: Hybrid
    overlap: bool
    seed: int
    submissions: tuple[Submission, ...]
    eos_offsets: dict[tuple[str, int], int]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    submissions = []
    for _ in range(draw(st.integers(1, 8))):
        num_blocks = draw(st.integers(1, 3))
        prompt = draw(st.integers(1, 4 * NUM_PAGES - num_blocks * BLOCK))
        submissions.append(
            Submission(
                (1,) * prompt,
                num_blocks * BLOCK,
                draw(st.sampled_from([RANDOM, quota(1), quota(2), quota(4)])),
                draw(st.integers(-(2**63), 2**63 - 1)),
                ignore_eos=draw(st.booleans()),
            )
        )
    hybrid = Hybrid(
        num_prefill=draw(st.integers(1, 3)),
        num_colocated=draw(st.integers(1, 3)),
        num_pages=NUM_PAGES,
        overflow=draw(st.booleans()),
        overload_threshold=draw(st.sampled_from([10, 40, 100, 1000])),
        decode_policy=draw(
            st.sampled_from(["max_free_memory", "round_robin", "balanced_length_clustering", "topology_guarded_memory"])
        ),
        prefill_policy=draw(st.sampled_from(["round_robin", "least_outstanding_prefill_tokens"])),
    )
    places = st.tuples(st.sampled_from([f"r{n}" for n in range(8)]), st.integers(0, 2))
    eos_offsets = draw(st.dictionaries(places, st.integers(0, BLOCK - 1), max_size=3))
    return Setup(hybrid, draw(st.booleans()), draw(st.integers(0, 999)), tuple(submissions), eos_offsets)


def script_of(setup: Setup) -> FakeScript:
    return FakeScript(num_unmasked=one_to_four, eos_token_ids=(EOS,), eos_offsets=setup.eos_offsets, lag_s=0.1)


def world_of(setup: Setup, hybrid: Hybrid) -> World:
    return World(hybrid, script_of(setup), overlap=setup.overlap, seed=setup.seed)


def results(world: World, setup: Setup) -> list[tuple[int, ...]]:
    """What the requests returned, once all have been sent and everything has happened."""
    tracked = [world.submit(submission) for submission in setup.submissions]
    world.settle()
    world.check_rest()
    assert {request.status.value for request in tracked} == {"COMPLETED"}
    return [request.poll_state(MASK_ID).generated_token_ids for request in tracked]


@settings(max_examples=120, deadline=None)
@given(setups())
def test_hybrid_gives_the_tokens_of_one_colocated_worker(setup: Setup) -> None:
    one = Hybrid(num_prefill=0, num_colocated=1, num_pages=NUM_PAGES)
    assert results(world_of(setup, setup.hybrid), setup) == results(world_of(setup, one), setup)


MOVES = st.one_of(
    st.tuples(st.sampled_from(["step", "kill"]), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("step"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("step"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("deliver"), st.just(0), st.just(0)),
    st.tuples(st.just("submit"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("break"), st.integers(0, 5), st.integers(0, 2)),
)


@settings(max_examples=250, deadline=None)
@given(setups(), st.lists(MOVES, max_size=100))
def test_whatever_dies_or_breaks_every_request_ends_once_and_every_page_comes_back(
    setup: Setup, moves: list[tuple[str, int, int]]
) -> None:
    world = world_of(setup, setup.hybrid)
    num_prefill, num_workers = setup.hybrid.num_prefill, setup.hybrid.num_prefill + setup.hybrid.num_colocated
    tracked = []
    for what, a, b in moves:
        match what:
            case "step":
                world.step(a % num_workers)
            case "kill":
                world.kill(a % num_workers)
            case "deliver":
                world.deliver()
            case "submit":
                tracked.append((a, world.submit(setup.submissions[a % len(setup.submissions)])))
            case "cancel":
                world.cancel(f"r{a}")
            case "break":
                ends = (a % num_prefill, num_prefill + b % setup.hybrid.num_colocated)
                world.break_link(*ends, deaf_id=(None, *ends)[(a + b) % 3])
        world.check()
    world.settle()
    world.check_rest()
    assert {request.status.value for _, request in tracked} <= {"COMPLETED", "CANCELLED"}
    if setup.eos_offsets:
        return
    calm = world_of(setup, Hybrid(num_prefill=0, num_colocated=1, num_pages=NUM_PAGES))
    untroubled = results(calm, setup)
    for number, request in tracked:
        if request.status.value == "COMPLETED":
            wanted = untroubled[number % len(setup.submissions)]
            assert request.poll_state(MASK_ID).generated_token_ids == wanted


@settings(max_examples=120, deadline=None)
@given(
    setups(),
    st.frozensets(st.sampled_from([f"r{n}" for n in range(8)]), max_size=2),
    st.frozensets(st.integers(0, 25), max_size=3),
    st.frozensets(st.integers(0, 25), max_size=3),
)
def test_requests_that_poison_their_batches_end_alone_and_all_others_complete(
    setup: Setup, poisonous: frozenset[str], failing_launches: frozenset[int], failing_collects: frozenset[int]
) -> None:
    untroubled = results(world_of(setup, setup.hybrid), setup)
    script = replace(
        script_of(setup),
        poisonous=poisonous,
        failing_launches=failing_launches,
        failing_collects=failing_collects,
    )
    # each of at most six workers has at most six failures that a block may meet alone
    world = World(setup.hybrid, script, overlap=setup.overlap, seed=setup.seed, retries=36)
    tracked = [world.submit(submission) for submission in setup.submissions]
    world.settle()
    world.check_rest()
    for request, wanted in zip(tracked, untroubled, strict=True):
        is_poisonous = request.request.request_id in poisonous
        assert request.status.value == ("ERROR" if is_poisonous else "COMPLETED"), request.error
        assert request.poll_state(MASK_ID).generated_token_ids == (() if is_poisonous else wanted)
