"""Routes by hand-worked cases; docs/scheduling.md has one for each."""

from __future__ import annotations

import random

import pytest

from dbench.serve.routes import DECODE_ROUTES, PREFILL_ROUTES, RouteState, WorkerLoad, link_id, read_fast_pairs


def load(worker_id: int, tokens: int = 0) -> WorkerLoad:
    return WorkerLoad(worker_id, tokens, num_requests=1, length_sum=tokens)


def state(seed: int = 0, *, slack_ratio: float = 0.1, topology_alpha: float = 0.0) -> RouteState:
    return RouteState(random.Random(seed), slack_ratio, topology_alpha)


def idle(worker_id: int) -> WorkerLoad:
    return WorkerLoad(worker_id, 0, 0, 0)


def active(worker_id: int, *lengths: int) -> WorkerLoad:
    return WorkerLoad(worker_id, sum(lengths), len(lengths), sum(lengths))


def near(worker_id: int, pages: int) -> WorkerLoad:
    return WorkerLoad(worker_id, 0, 0, 0, pages, has_fast_link=True)


def far(worker_id: int, pages: int) -> WorkerLoad:
    return WorkerLoad(worker_id, 0, 0, 0, pages)


def test_round_robin_goes_on_from_the_last_worker() -> None:
    memory = state()
    route = PREFILL_ROUTES["round_robin"]
    loads = [load(0), load(1), load(2)]
    assert [route(loads, 10, memory) for _ in range(4)] == [0, 1, 2, 0]
    assert route([load(0), load(2)], 10, memory) == 2
    assert route(loads, 10, memory) == 0


def test_least_outstanding_takes_the_worker_with_the_fewest_tokens() -> None:
    route = PREFILL_ROUTES["least_outstanding_prefill_tokens"]
    assert route([load(0, 50), load(1, 20), load(2, 30)], 10, state()) == 1


@pytest.mark.parametrize("name", sorted(PREFILL_ROUTES.keys() - {"round_robin"}))
def test_ties_are_drawn_evenly_by_the_seed(name: str) -> None:
    route = PREFILL_ROUTES[name]
    loads = [load(0, 20), load(1, 20), load(2, 60)]
    first, again = state(7), state(7)
    drawn = [route(loads, 10, first) for _ in range(100)]
    assert drawn == [route(loads, 10, again) for _ in range(100)]
    if name == "least_outstanding_requests":
        assert set(drawn) == {0, 1, 2}
    else:
        assert set(drawn) == {0, 1}
        assert 30 <= drawn.count(0) <= 70


def test_clustering_prefers_the_worker_of_like_lengths_within_the_slack() -> None:
    route = PREFILL_ROUTES["balanced_length_clustering"]
    loads = [active(0, 1000, 1000), active(1, 2100)]
    assert route(loads, 2000, state()) == 1
    assert route(loads, 1000, state()) == 0


def test_clustering_keeps_workers_beyond_the_slack_out_of_it() -> None:
    route = PREFILL_ROUTES["balanced_length_clustering"]
    loads = [active(0, 1000, 1000), active(1, 2500)]
    assert route(loads, 2000, state()) == 0
    assert route(loads, 2000, state(slack_ratio=0.2)) == 1


def test_the_new_canvas_counts_in_the_sums_that_the_slack_compares() -> None:
    route = PREFILL_ROUTES["balanced_length_clustering"]
    loads = [active(0, 100), active(1, 300)]
    assert route(loads, 300, state()) == 0  # 400 and 600
    assert route(loads, 3000, state()) == 1  # 3100 and 3300


def test_clustering_takes_an_idle_worker_only_if_no_active_one_is_within_the_slack() -> None:
    route = PREFILL_ROUTES["balanced_length_clustering"]
    assert route([idle(0), active(1, 100)], 2000, state()) == 1
    assert route([idle(0), active(1, 1000)], 2000, state()) == 0


def test_without_slack_clustering_is_the_plain_policy_of_its_mode() -> None:
    loads = [active(0, 500), active(1, 400), active(2, 600)]
    assert PREFILL_ROUTES["balanced_length_clustering"](loads, 500, state(slack_ratio=0)) == 1
    memory = state(slack_ratio=0)
    assert [DECODE_ROUTES["balanced_length_clustering"](loads, 500, memory) for _ in range(4)] == [0, 1, 2, 0]


def test_a_fast_link_wins_until_it_has_too_little_memory() -> None:
    route = DECODE_ROUTES["topology_guarded_memory"]
    loads = [near(0, 30), near(1, 50), far(2, 100)]
    assert route(loads, 10, state()) == 1
    assert route(loads, 10, state(topology_alpha=0.5)) == 1
    assert route(loads, 10, state(topology_alpha=0.51)) == 2


def test_without_a_fast_link_the_roomiest_worker_is_taken() -> None:
    assert DECODE_ROUTES["topology_guarded_memory"]([far(0, 30), far(1, 50)], 10, state()) == 1


def test_fast_pairs_are_undirected() -> None:
    assert read_fast_pairs("0-1, 3-2") == {frozenset({"0", "1"}), frozenset({"2", "3"})}


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0-0", "with itself"), (",", "names no pair"), ("0-1-2", "no pair"), ("0", "no pair"), ("a-b", "no pair")],
)
def test_what_is_no_list_of_pairs_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_fast_pairs(text)


def test_a_gpu_goes_by_its_number_and_a_cpu_worker_by_its_own() -> None:
    assert [link_id("cuda:3", 0), link_id("5", 1), link_id("cpu", 2)] == ["3", "5", "2"]


def test_a_gpu_of_another_host_is_in_no_pair() -> None:
    assert not any(link_id("cuda:3 on far", worker_id).isdecimal() for worker_id in (0, 3))
