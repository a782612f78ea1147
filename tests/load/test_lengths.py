"""What is done to lengths is what the rules say, and is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import OptionError, TraceError
from dbench.load.lengths import LengthRules, fit, length_source, prompt_source, request_seed
from dbench.load.traces import LengthPair
from tests.load.builders import small_load

RULES = LengthRules(
    prompt_scale=1.0, gen_scale=1.0, block_length=32, max_total_tokens=4096, max_model_len=4096, max_gen_len=None
)


@given(
    pair=st.builds(LengthPair, st.integers(1, 20_000), st.integers(1, 20_000)),
    prompt_scale=st.floats(0.01, 10),
    gen_scale=st.floats(0.01, 10),
    block_length=st.integers(1, 64),
    max_total_tokens=st.integers(2, 4096),
    max_gen_len=st.none() | st.integers(1, 40).map(lambda blocks: blocks * 64),
)
def test_fitted_lengths_satisfy_every_rule_or_the_generation_alone_does_not_fit(
    pair: LengthPair,
    prompt_scale: float,
    gen_scale: float,
    block_length: int,
    max_total_tokens: int,
    max_gen_len: int | None,
) -> None:
    rules = LengthRules(prompt_scale, gen_scale, block_length, max_total_tokens, 4096, max_gen_len)
    try:
        fitted = fit(pair, rules)
    except TraceError:
        gen_len = max(1, round(pair.gen_len * gen_scale)) + block_length
        assert gen_len >= max_total_tokens or (max_gen_len is not None and gen_len > min(max_gen_len, 4095))
        return
    wanted_gen_len = max(1, round(pair.gen_len * gen_scale))
    num_masks = max_gen_len or fitted.gen_len
    assert fitted.gen_len % block_length == 0
    assert 0 <= fitted.gen_len - wanted_gen_len < block_length
    assert fitted.was_rounded == (fitted.gen_len != wanted_gen_len)
    assert 1 <= fitted.prompt_len <= max(1, round(pair.prompt_len * prompt_scale))
    assert fitted.was_shortened == (fitted.prompt_len < max(1, round(pair.prompt_len * prompt_scale)))
    assert fitted.prompt_len + fitted.gen_len <= max_total_tokens
    assert fitted.prompt_len + num_masks <= 4096


def test_a_prompt_is_cut_no_more_than_needed_and_after_the_rounding() -> None:
    fitted = fit(LengthPair(4000, 90), RULES)
    assert (fitted.prompt_len, fitted.gen_len) == (4000, 96)
    fitted = fit(LengthPair(4001, 90), RULES)
    assert (fitted.prompt_len, fitted.gen_len, fitted.was_shortened) == (4000, 96, True)


def test_a_server_with_a_fixed_number_of_masks_leaves_less_room_for_the_prompt() -> None:
    fitted = fit(LengthPair(4000, 32), replace(RULES, max_gen_len=512))
    assert (fitted.prompt_len, fitted.gen_len) == (4096 - 512, 32)


def test_tiny_scales_leave_one_prompt_token_and_one_block() -> None:
    fitted = fit(LengthPair(3, 3), replace(RULES, prompt_scale=0.001, gen_scale=0.001))
    assert (fitted.prompt_len, fitted.gen_len) == (1, 32)


def test_a_generation_that_never_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(TraceError, match=r"gen_len 5000 generates 5024 tokens.*at most 4096"):
        fit(LengthPair(10, 5000), RULES)
    with pytest.raises(TraceError, match=r"generates 160 tokens.*max_gen_len 128"):
        fit(LengthPair(10, 150), replace(RULES, max_gen_len=128))


def test_a_limit_above_the_context_of_the_server_is_refused() -> None:
    with pytest.raises(OptionError, match=r"max_total_tokens is 8192.*context limit 4096"):
        replace(RULES, max_total_tokens=8192)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"length_type": "trace"}, "no trace is given"),
        ({"length_type": "fixed", "trace": "arxiv"}, "trace is arxiv, but length_type is fixed"),
        ({"length_scale": 0.5}, "need a trace"),
        ({"gen_scale": 2.0}, "need a trace"),
    ],
)
def test_length_options_that_contradict_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        length_source(small_load(**options))


@given(seed=st.integers(0, 2**63), length=st.integers(1, 200), index=st.integers(0, 10_000))
def test_prompts_leave_reserved_ids_out_and_depend_on_seed_and_index_alone(seed: int, length: int, index: int) -> None:
    source = prompt_source(50, frozenset({0, 7, 49}), seed)
    prompt = source.prompt(2, index, length)
    assert len(prompt) == length
    assert set(prompt) <= set(range(50)) - {0, 7, 49}
    assert prompt == prompt_source(50, frozenset({0, 7, 49}), seed).prompt(2, index, length)


def test_prompts_of_different_requests_differ() -> None:
    source = prompt_source(1000, frozenset(), 42)
    assert len({source.prompt(2, index, 16) for index in range(500)}) == 500


def test_prompts_use_the_whole_vocabulary() -> None:
    prompt = prompt_source(20, frozenset({3}), 42).prompt(2, 0, 2000)
    assert set(prompt) == set(range(20)) - {3}
    assert all(type(token_id) is int for token_id in prompt)


def test_a_vocabulary_of_reserved_ids_is_refused() -> None:
    with pytest.raises(OptionError, match="reserves all 2 token ids"):
        prompt_source(2, frozenset({0, 1}), 42)


def test_request_seeds_are_int64_distinct_and_never_change() -> None:
    seeds = [request_seed(42, index) for index in range(-100, 1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert request_seed(42, 0) == -4739222269453672797
