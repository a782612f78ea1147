"""The page pool."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.serve.pages import PagePool


def test_pages_cover_the_tokens_the_last_one_in_part() -> None:
    pool = PagePool(10, 16)
    assert [pool.pages_for(n) for n in (1, 16, 17, 160)] == [1, 1, 2, 10]


def test_taken_pages_are_distinct_and_counted() -> None:
    pool = PagePool(5, 16)
    first, second = pool.take(33), pool.take(20)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(3, 16)
    assert pool.take(49) is None
    assert pool.num_free == 3


def test_given_pages_can_be_taken_again() -> None:
    pool = PagePool(2, 16)
    pages = pool.take(32)
    assert pages is not None
    pool.give(pages)
    assert pool.num_free == 2
    assert sorted(pool.take(32) or ()) == [0, 1]


def test_giving_a_page_twice_is_an_invariant_failure_with_counts() -> None:
    pool = PagePool(4, 16)
    pages = pool.take(40)
    assert pages is not None
    pool.give(pages)
    with pytest.raises(AssertionError, match=r"not lent \(4 free \+ 0 used of 4 pages\)"):
        pool.give(pages)


@pytest.mark.parametrize("foreign", [-1, 4, 99])
def test_giving_a_foreign_page_is_an_invariant_failure(foreign: int) -> None:
    with pytest.raises(AssertionError, match=f"page {foreign} was given back but is not lent"):
        PagePool(4, 16).give((foreign,))


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(4, 16)
    pool._free.pop()
    with pytest.raises(AssertionError, match=r"3 free \+ 0 used of 4 pages"):
        pool.check()


def test_check_finds_a_page_that_is_free_twice() -> None:
    pool = PagePool(4, 16)
    pool._free[0] = pool._free[1]
    with pytest.raises(AssertionError, match="do not add up"):
        pool.check()


@given(st.lists(st.integers(1, 70), max_size=40), st.randoms(use_true_random=False))
def test_pages_are_conserved_whatever_is_taken_and_given(sizes: list[int], random: Random) -> None:
    pool = PagePool(12, 8)
    held: list[tuple[int, ...]] = []
    for size in sizes:
        pages = pool.take(size)
        assert (pages is None) == (pool.pages_for(size) > 12 - sum(map(len, held)))
        if pages is not None:
            assert len(pages) == pool.pages_for(size)
            held.append(pages)
        elif held:
            pool.give(held.pop(random.randrange(len(held))))
        lent = [page for pages in held for page in pages]
        assert len(set(lent)) == len(lent) == pool.num_used
        pool.check()
