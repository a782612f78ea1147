"""Token budget and admission, queue orders and spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import OptionError
from dbench.serve.policy import (
    QUEUE_ORDERS,
    SPANS,
    Admission,
    Room,
    Stop,
    TokenBudget,
    admit,
    choose,
)
from tests.serve.engine_builders import make_task

PLENTY = Room(free_pages=10_000, page_size=16, free_slots=128)


def budget(prior: int = 0, decode_tokens: int = 0, limit: int = 4096) -> TokenBudget:
    return TokenBudget(limit, 32, prior, decode_tokens)


# ---- fresh and available ------------------------------------------------------------------------


def test_fresh_budget_is_what_the_decode_spans_leave() -> None:
    assert budget(decode_tokens=1024).fresh == 3072


def test_fresh_budget_is_at_least_one_block() -> None:
    assert budget(decode_tokens=4090).fresh == 32
    assert budget(decode_tokens=9000).fresh == 32


def test_available_adds_the_deficit_saved_before() -> None:
    assert budget(prior=500, decode_tokens=1024).available == 3572


# ---- who is admitted ----------------------------------------------------------------------------


def test_everything_that_fits_is_admitted_and_no_deficit_remains() -> None:
    assert admit([1000, 2000], budget(prior=700), PLENTY) == Admission(2, 3000, Stop.NOTHING_WAITING, 0)


def test_an_empty_queue_forgets_the_deficit() -> None:
    assert admit([], budget(prior=700, decode_tokens=32), PLENTY) == Admission(0, 0, Stop.NOTHING_WAITING, 0)


def test_a_refresh_that_exceeds_the_budget_saves_what_is_left_of_it() -> None:
    got = admit([1000, 2000, 500], budget(decode_tokens=1024), PLENTY)
    assert got == Admission(2, 3000, Stop.TOKENS, 72)


def test_saved_budget_lets_a_long_refresh_in_later() -> None:
    first = admit([3500], budget(decode_tokens=1024), PLENTY)
    assert first == Admission(0, 0, Stop.TOKENS, 3072)
    second = admit([3500], budget(prior=first.deficit, decode_tokens=1024), PLENTY)
    assert second == Admission(1, 3500, Stop.NOTHING_WAITING, 0)


def test_a_budget_of_exactly_the_canvas_is_enough() -> None:
    assert admit([3072], budget(decode_tokens=1024), PLENTY).num_admitted == 1
    assert admit([3073], budget(decode_tokens=1024), PLENTY).num_admitted == 0


def test_nothing_overtakes_the_first_that_does_not_fit() -> None:
    assert admit([3000, 2000, 10], budget(), PLENTY) == Admission(1, 3000, Stop.TOKENS, 1096)


def test_full_pages_keep_the_deficit_that_was_there() -> None:
    room = Room(free_pages=100, page_size=16, free_slots=128)
    assert admit([1000, 1000], budget(prior=500, decode_tokens=1024), room) == Admission(1, 1000, Stop.PAGES, 500)


def test_full_pages_after_spending_savings_keep_the_rest_of_them() -> None:
    room = Room(free_pages=207, page_size=16, free_slots=128)  # 3,300 tokens fill them
    assert admit([3300, 16], budget(prior=500, decode_tokens=1024), room) == Admission(1, 3300, Stop.PAGES, 272)


def test_pages_count_per_canvas_not_per_token() -> None:
    room = Room(free_pages=2, page_size=16, free_slots=128)
    assert admit([17, 1], budget(), room) == Admission(1, 17, Stop.PAGES, 0)


def test_full_slots_change_the_deficit_like_full_pages() -> None:
    room = Room(free_pages=10_000, page_size=16, free_slots=1)
    assert admit([1000, 1000], budget(prior=500, decode_tokens=1024), room) == Admission(1, 1000, Stop.SLOTS, 500)
    assert admit([3300, 16], budget(prior=500, decode_tokens=1024), room) == Admission(1, 3300, Stop.SLOTS, 272)


def test_no_free_slot_admits_nothing() -> None:
    room = Room(free_pages=10_000, page_size=16, free_slots=0)
    assert admit([10], budget(prior=7), room) == Admission(0, 0, Stop.SLOTS, 7)


def test_a_refresh_that_lacks_tokens_and_pages_is_stopped_by_tokens() -> None:
    room = Room(free_pages=1, page_size=16, free_slots=0)
    assert admit([3500], budget(decode_tokens=1024), room) == Admission(0, 0, Stop.TOKENS, 3072)


def test_an_oversized_refresh_goes_alone_when_nothing_decodes() -> None:
    assert admit([9000], budget(), PLENTY) == Admission(1, 9000, Stop.NOTHING_WAITING, 0)
    assert admit([9000, 1], budget(), PLENTY) == Admission(1, 9000, Stop.TOKENS, 0)
    assert admit([9000, 1], budget(prior=300), PLENTY) == Admission(1, 9000, Stop.TOKENS, 0)


def test_an_oversized_refresh_waits_while_something_decodes() -> None:
    assert admit([9000], budget(decode_tokens=32), PLENTY) == Admission(0, 0, Stop.TOKENS, 4064)


def test_an_oversized_refresh_waits_behind_an_admitted_one() -> None:
    assert admit([10, 9000], budget(), PLENTY) == Admission(1, 10, Stop.TOKENS, 4086)


def test_an_oversized_refresh_still_needs_pages() -> None:
    room = Room(free_pages=100, page_size=16, free_slots=128)
    assert admit([9000], budget(prior=300), room) == Admission(0, 0, Stop.PAGES, 300)


def test_admission_reads_no_further_than_the_first_that_does_not_fit() -> None:
    queue = iter([4000, 200, 300, 400])
    admit(queue, budget(), PLENTY)
    assert list(queue) == [300, 400]


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40), st.integers(0, 4)), min_size=1, max_size=30),
    st.integers(1, 200),
)
def test_the_deficit_stays_below_the_longest_canvas(
    canvases: list[int], iterations: list[tuple[int, int, int]], limit: int
) -> None:
    waiting, deficit = list(canvases), 0
    for decode_tokens, free_pages, free_slots in iterations:
        room = Room(free_pages, 8, free_slots)
        got = admit(waiting, TokenBudget(limit, 4, deficit, decode_tokens), room)
        assert got.num_tokens == sum(waiting[: got.num_admitted])
        assert got.num_admitted <= free_slots
        assert sum(-(-canvas // 8) for canvas in waiting[: got.num_admitted]) <= free_pages
        waiting, deficit = waiting[got.num_admitted :], got.deficit
        assert 0 <= deficit < max(canvases)
        assert waiting or deficit == 0


@given(st.integers(1, 5000), st.integers(0, 300))
def test_a_waiting_refresh_is_admitted_in_the_end_however_much_decodes(canvas: int, decode_tokens: int) -> None:
    deficit = 0
    for _ in range(-(-canvas // 32) + 1):
        got = admit([canvas], TokenBudget(100, 32, deficit, decode_tokens), PLENTY)
        if got.num_admitted:
            return
        assert got.deficit >= deficit + 32
        deficit = got.deficit
    pytest.fail(f"never admitted, deficit {deficit}")


# ---- tables -------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"unknown prefill_queue_policy 'arival_order'; did you mean 'arrival_order'"):
        choose("prefill_queue_policy", QUEUE_ORDERS, "arival_order")


def test_arrival_order_is_by_submission_time() -> None:
    tasks = [make_task("late", arrival_s=2.0), make_task("early", arrival_s=1.0, num_remaining_blocks=9)]
    assert min(tasks, key=QUEUE_ORDERS["arrival_order"]).key.request_id == "early"


def test_fewest_remaining_blocks_goes_before_arrival() -> None:
    order = QUEUE_ORDERS["fewest_remaining_blocks"]
    tasks = [
        make_task("long", arrival_s=1.0, num_remaining_blocks=9),
        make_task("short late", arrival_s=3.0, num_remaining_blocks=2),
        make_task("short early", arrival_s=2.0, num_remaining_blocks=2),
    ]
    assert [t.key.request_id for t in sorted(tasks, key=order)] == ["short early", "short late", "long"]


def test_a_refresh_computes_the_canvas_and_a_decode_step_the_block() -> None:
    task = make_task(prompt=10, masks=12)
    assert SPANS["exact"]["refresh"](task, 0) == (0, 22, 0)
    assert SPANS["exact"]["decode"](task, 0) == (10, 4, 10)


def test_a_shifted_model_decodes_from_one_row_further_left_and_leaves_that_row_as_it_was() -> None:
    task = make_task(prompt=10, masks=12)
    assert SPANS["exact"]["refresh"](task, 1) == (0, 22, 0)
    assert SPANS["exact"]["decode"](task, 1) == (9, 5, 10)


@pytest.mark.parametrize("logit_shift", [0, 1])
def test_without_a_cache_every_step_computes_and_writes_the_canvas(logit_shift: int) -> None:
    task = make_task(prompt=10, masks=12)
    assert SPANS["none"]["refresh"](task, logit_shift) == (0, 22, 0)
    assert SPANS["none"]["decode"](task, logit_shift) == (0, 22, 0)
