"""Philox-4x32-10 and the noise made of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbench.serve.noise import DrawKeys, Tag, gumbel, philox, token_noise, word
from tests.serve.reference import draw, noise, noise_of_tokens, philox_scalar

WORDS = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key, result: published with the Random123 library."""


def ints(text: str) -> list[int]:
    return [int(part, 16) for part in text.split()]


def philox_of(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([value]) for value in counter)
    k0, k1 = (torch.tensor([value]) for value in key)
    return [int(value) for value in philox((c0, c1, c2, c3), (k0, k1))]


def keys_of(seed: int, position: int, step: int) -> DrawKeys:
    return DrawKeys(torch.tensor([seed]), torch.tensor([position]), torch.tensor([step]))


def uniform(noise: float) -> float:
    """The number in (0, 1) that gives this noise."""
    return -math.expm1(-math.exp(-noise))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    assert philox_of(ints(counter), ints(key)) == ints(result)
    assert philox_scalar(ints(counter), ints(key)) == ints(result)


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=2, max_size=2))
def test_philox_equals_its_scalar_twin(counter: list[int], key: list[int]) -> None:
    assert philox_of(counter, key) == philox_scalar(counter, key)


@given(INT64, st.integers(0, 4095), st.integers(0, 1023), st.sampled_from(Tag))
def test_a_word_is_keyed_by_seed_position_step_and_tag(seed: int, position: int, step: int, tag: Tag) -> None:
    assert int(word(keys_of(seed, position, step), tag)) == draw(seed, 0, position, step, int(tag))[0]


@given(INT64, st.integers(0, 4095), st.integers(0, 1023), st.integers(0, 50), st.integers(1, 9))
def test_token_noise_is_keyed_by_token(seed: int, position: int, step: int, quarter: int, count: int) -> None:
    found = token_noise(keys_of(seed, position, step), 4 * quarter, count)[0].tolist()
    wanted = [noise(seed, 4 * quarter + i, position, step) for i in range(count)]
    # compared as the uniform numbers behind them: noise is steep where those come near 1
    assert [uniform(value) for value in found] == pytest.approx([uniform(value) for value in wanted], rel=1e-5)


@pytest.mark.parametrize("x", [0, 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 129, 2**32 - 128, 2**32 - 1])
def test_noise_is_finite_for_the_words_at_the_edges(x: int) -> None:
    value = float(gumbel(torch.tensor([x])))
    assert -2.82 < value < 22.88
    exact = -math.log(-math.log1p(-(x + 0.5) / 2**32))
    assert value == pytest.approx(max(exact, -2.8112), abs=0.03 if x > 2**31 else 1e-4)


def test_noise_falls_as_the_word_grows() -> None:
    values = gumbel(torch.arange(0, 2**32, 2**22 + 1))
    assert bool((values.diff() < 0).all())


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    keys = DrawKeys(torch.arange(200), torch.full((200,), 7), torch.zeros(200, dtype=torch.int64))
    values = token_noise(keys, 0, 1000).double()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


@given(INT64, st.integers(0, 4095), st.integers(0, 1023), st.integers(1, 13))
def test_the_reference_draws_the_noise_of_many_tokens_as_of_each(
    seed: int, position: int, step: int, count: int
) -> None:
    wanted = [noise(seed, token, position, step) for token in range(count)]
    assert noise_of_tokens(seed, count, position, step).tolist() == pytest.approx(wanted, rel=1e-12)
