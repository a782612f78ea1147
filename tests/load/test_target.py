"""How the server's clock is brought to ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.load.target import ClockOffset


def test_clocks_that_can_be_one_clock_are_taken_as_one() -> None:
    offset = ClockOffset()
    offset.add(100.0, 100.3, 101.0)
    assert offset.offset_s == 0.0


def test_the_shortest_round_trip_decides() -> None:
    offset = ClockOffset()
    offset.add(100.0, 5.0, 101.0)
    offset.add(102.0, 7.0, 102.5)
    offset.add(103.0, 8.9, 105.0)
    assert offset.offset_s == pytest.approx(102.25 - 7.0)


@given(
    ahead_s=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=6),
)
def test_the_offset_is_as_good_as_half_the_shortest_round_trip(
    ahead_s: float, trips: list[tuple[float, float]]
) -> None:
    """`ahead_s` is the truth: our clock less the server's."""
    offset = ClockOffset()
    for there_s, back_s in trips:
        offset.add(0.0, there_s - ahead_s, there_s + back_s)
    shortest_s = min(there_s + back_s for there_s, back_s in trips)
    error_s = abs(offset.offset_s - ahead_s)
    assert error_s <= (shortest_s if offset.offset_s == 0.0 else shortest_s / 2) + 1e-6


def test_nothing_is_known_before_the_first_round_trip() -> None:
    assert ClockOffset().offset_s == 0.0
