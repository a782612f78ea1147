"""What a server refuses, and that its one line holds the numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dbench.errors import RequestError
from dbench.serve.sequence import SamplingParameters
from dbench.serve.validation import RequestLimits, check_submission
from dbench.serve.wire import Submission
from dbench.unmasking_rules import UNMASKING_RULES

LIMITS = RequestLimits(
    block_length=4, max_gen_len=None, max_model_len=32, vocabulary_size=100, kv_max_pages=10, kv_page_size=4
)


def refusal(submission: Submission, limits: RequestLimits = LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        check_submission(submission, limits)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("gen_length", [4, 8, 28])
def test_multiples_of_the_block_that_fit_are_taken(gen_length: int) -> None:
    check_submission(Submission((0, 1, 2, 99), gen_length), LIMITS)


@pytest.mark.parametrize(("gen_length", "near"), [(5, 8), (3, 4), (0, 4), (-4, 4)])
def test_another_gen_length_is_refused_with_both_numbers_and_a_nearby_one(gen_length: int, near: int) -> None:
    line = refusal(Submission((1,), gen_length))
    assert f"gen_length {gen_length} " in line
    assert "block_length 4" in line
    assert line.endswith(f"send {near}")


def test_a_gen_length_above_max_gen_len_is_refused() -> None:
    line = refusal(Submission((1,), 12), replace(LIMITS, max_gen_len=8))
    assert "gen_length 12" in line
    assert "max_gen_len 8" in line


def test_the_canvas_counts_max_gen_len_masks() -> None:
    limits = replace(LIMITS, max_gen_len=16)
    check_submission(Submission((1,) * 16, 4), limits)
    assert "17 prompt tokens + 16 masks = 33 exceed the context limit of 32" in refusal(
        Submission((1,) * 17, 4), limits
    )


def test_a_canvas_larger_than_the_pool_is_refused() -> None:
    line = refusal(Submission((1,) * 21, 4), replace(LIMITS, kv_max_pages=6))
    assert "21 prompt tokens + 4 masks = 25" in line
    assert "6 pages x 4 = 24 tokens" in line


def test_an_empty_prompt_is_refused() -> None:
    assert "prompt is empty" in refusal(Submission((), 4))


@pytest.mark.parametrize("bad", [-1, 100])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(bad: int) -> None:
    line = refusal(Submission((5, bad, 7), 4))
    assert f"prompt_token_ids[1] is {bad}" in line
    assert "0 to 99" in line


def test_a_seed_beyond_int64_is_refused() -> None:
    check_submission(Submission((1,), 4, request_seed=-(2**63)), LIMITS)
    assert str(2**63) in refusal(Submission((1,), 4, request_seed=2**63))


def test_an_unknown_strategy_names_the_known_ones() -> None:
    line = refusal(Submission((1,), 4, SamplingParameters("conf_treshold")))
    assert "did you mean 'conf_threshold'" in line
    assert all(name in line for name in UNMASKING_RULES)


@pytest.mark.parametrize("temperature", [-0.1, 1.000001e6, 1e39, math.inf, math.nan])
def test_a_temperature_beyond_what_float32_can_carry_is_refused(temperature: float) -> None:
    line = refusal(Submission((1,), 4, SamplingParameters(temperature=temperature)))
    assert line == f"temperature is {temperature}, wanted 0 to 1e+06"


def test_the_largest_temperature_is_taken() -> None:
    check_submission(Submission((1,), 4, SamplingParameters(temperature=1e6)), LIMITS)


def test_a_faulty_rule_is_refused_with_its_fault() -> None:
    line = refusal(Submission((1,), 4, SamplingParameters("conf_quota", fixed_unmask_quota=0)))
    assert line == "fixed_unmask_quota is 0, wanted at least 1"
