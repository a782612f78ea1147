"""What a server refuses, and that its one line holds the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dbench.errors import RequestError
from dbench.serve.sequence import STRATEGY_PARAMETER, SamplingParameters
from dbench.serve.validation import PARAMETER_RANGES, RequestLimits, check_sampling, check_submission
from dbench.serve.wire import Submission

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
    assert all(name in line for name in STRATEGY_PARAMETER)


@pytest.mark.parametrize("temperature", [-0.1, math.inf, math.nan])
def test_a_temperature_must_be_finite_and_not_negative(temperature: float) -> None:
    assert "temperature is" in refusal(Submission((1,), 4, SamplingParameters(temperature=temperature)))


def test_conf_threshold_alone_has_a_default() -> None:
    check_sampling(SamplingParameters("conf_threshold"))
    with pytest.raises(RequestError, match="conf_quota needs fixed_unmask_quota"):
        check_sampling(SamplingParameters("conf_quota"))


@pytest.mark.parametrize("strategy", STRATEGY_PARAMETER)
def test_a_foreign_parameter_is_refused_by_name(strategy: str) -> None:
    values: dict[str, Any] = {"confidence_threshold": 0.5, "fixed_unmask_quota": 2}
    own = STRATEGY_PARAMETER[strategy]
    for foreign in values.keys() - {own}:
        given = {name: value for name, value in values.items() if name in (own, foreign)}
        with pytest.raises(RequestError, match=f"{foreign} .* does not belong to {strategy}"):
            check_sampling(SamplingParameters(strategy, **given))


@pytest.mark.parametrize(
    ("strategy", "value"),
    [("conf_threshold", 0.0), ("conf_threshold", 1.01), ("conf_threshold", math.nan), ("conf_quota", 0)],
)
def test_a_parameter_out_of_range_is_refused(strategy: str, value: Any) -> None:
    name = STRATEGY_PARAMETER[strategy]
    assert name is not None
    with pytest.raises(RequestError, match=f"{name} is .*, wanted"):
        check_sampling(SamplingParameters(strategy, **{name: value}))


def test_every_rule_parameter_has_a_range() -> None:
    assert {name for name in STRATEGY_PARAMETER.values() if name} == PARAMETER_RANGES.keys()
