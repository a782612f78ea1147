"""From a pair of lengths to a request that the server accepts: scaled, rounded, cut; and its random prompt.

Every length is a number of tokens. What was changed is counted, and nothing is changed that is not counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from dbench.errors import OptionError, TraceError
from dbench.load.traces import TASKS_TRACE, LengthPair, TaskTrace, Trace, open_trace
from dbench.options import LoadOptions


@dataclass(frozen=True, slots=True)
class LengthRules:
    """What every request's lengths must satisfy."""

    prompt_scale: float
    gen_scale: float
    block_length: int
    max_total_tokens: int
    """Of prompt + generation."""
    max_model_len: int
    """Of the canvas, which carries `max_gen_len` masks where the server fixes that number."""
    max_gen_len: int | None

    def __post_init__(self) -> None:
        if self.max_total_tokens > self.max_model_len:
            raise OptionError(
                f"max_total_tokens is {self.max_total_tokens}, more than the server's context limit "
                f"{self.max_model_len}; lower it, or serve with a longer max_model_len"
            )


@dataclass(frozen=True, slots=True)
class FittedLengths:
    """The lengths of one request, and what was done to them."""

    prompt_len: int
    gen_len: int
    was_rounded: bool
    was_shortened: bool


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Every request alike: a Trace of one pair."""

    pair: LengthPair

    @property
    def name(self) -> str:
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def num_rows(self) -> int | None:
        return None

    def pairs(self, generator: np.random.Generator, *, shuffle: bool) -> Iterator[LengthPair]:
        return repeat(self.pair)


def length_source(load: LoadOptions) -> Trace:
    """What the length options ask for. Raises OptionError for options that contradict, TraceError for a bad trace."""
    source = _length_source(load)
    if isinstance(source, TaskTrace):
        if scales_of(load) != (1.0, 1.0):
            raise OptionError(
                f"trace {source.name} asks whole problems, which have no other length; "
                "leave out length_scale, prompt_scale and gen_scale"
            )
    elif load.check_answers:
        what = f"trace {source.name}" if source.name else f"length_type {load.length_type or 'fixed'}"
        raise OptionError(f"check_answers: {what} has no answers to compare with; use it with --trace {TASKS_TRACE}")
    return source


def _length_source(load: LoadOptions) -> Trace:
    length_type = load.length_type or ("fixed" if load.trace is None else "trace")
    if length_type == "trace":
        if load.trace is None:
            raise OptionError("length_type is trace, but no trace is given; add --trace NAME or --trace FILE.csv")
        return open_trace(load.trace)
    if load.trace is not None:
        raise OptionError(f"trace is {load.trace}, but length_type is fixed; leave one of them out")
    if scales_of(load) != (1.0, 1.0):
        raise OptionError("length_scale, prompt_scale and gen_scale need a trace; set prompt_tokens and gen_tokens")
    return FixedLengths(LengthPair(load.prompt_tokens, load.gen_tokens))


def ignores_eos(load: LoadOptions) -> bool:
    """Whether requests are decoded past their end of text: as told, else wherever lengths are all that counts."""
    return load.trace != TASKS_TRACE if load.ignore_eos is None else load.ignore_eos


def scales_of(load: LoadOptions) -> tuple[float, float]:
    """Factors on prompt and generated length."""
    prompt_scale = load.length_scale if load.prompt_scale is None else load.prompt_scale
    gen_scale = load.length_scale if load.gen_scale is None else load.gen_scale
    return prompt_scale, gen_scale


def fit(pair: LengthPair, rules: LengthRules) -> FittedLengths:
    """Scale both lengths, raise the generation to whole blocks, then cut the prompt to what remains.

    Scaled lengths are rounded to whole tokens, at least 1. Raises TraceError if the generation alone is too long.
    """
    prompt_len = max(1, round(pair.prompt_len * rules.prompt_scale))
    wanted_gen_len = max(1, round(pair.gen_len * rules.gen_scale))
    gen_len = -(-wanted_gen_len // rules.block_length) * rules.block_length
    if rules.max_gen_len is not None and gen_len > rules.max_gen_len:
        raise TraceError(_too_long(pair, gen_len, f"the server's max_gen_len {rules.max_gen_len}"))
    num_masks = gen_len if rules.max_gen_len is None else rules.max_gen_len
    longest_prompt = min(rules.max_total_tokens - gen_len, rules.max_model_len - num_masks)
    if longest_prompt < 1:
        limit = min(rules.max_total_tokens, rules.max_model_len - num_masks + gen_len)
        raise TraceError(_too_long(pair, gen_len, f"{limit} tokens less one for the prompt"))
    return FittedLengths(
        prompt_len=min(prompt_len, longest_prompt),
        gen_len=gen_len,
        was_rounded=gen_len != wanted_gen_len,
        was_shortened=prompt_len > longest_prompt,
    )


def _too_long(pair: LengthPair, gen_len: int, limit: str) -> str:
    return (
        f"a request with prompt_len {pair.prompt_len}, gen_len {pair.gen_len} generates {gen_len} tokens after scaling "
        f"and rounding, wanted at most {limit}; lower gen_scale or gen_tokens, or raise the limit"
    )


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Random prompts: a request's ids depend on the run's seed and its stream and index alone."""

    ids: NDArray[np.object_]
    """Every id that may be drawn, as Python ints: prompts share them, so an id costs 8 bytes, not 36."""
    seed: int

    def prompt(self, stream: int, index: int, length: int) -> tuple[int, ...]:
        """`length` ids, uniform and independent."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(stream, index))
        places = np.random.Generator(np.random.PCG64(sequence)).integers(len(self.ids), size=length)
        return tuple(self.ids[places].tolist())


def prompt_source(vocabulary_size: int, reserved_token_ids: frozenset[int], seed: int) -> PromptSource:
    """Draws from the whole vocabulary but the reserved ids. Raises OptionError if nothing is left."""
    ids = [i for i in range(vocabulary_size) if i not in reserved_token_ids]
    if not ids:
        raise OptionError(f"the server reserves all {vocabulary_size} token ids: no prompt can be drawn")
    return PromptSource(np.array(ids, dtype=np.object_), seed)


def request_seed(seed: int, index: int) -> int:
    """The int64 seed of request `index` in the run with `seed`.

    SHA-256 of "dbench SEED INDEX"; the first 8 bytes, big-endian, as a signed integer.
    """
    digest = hashlib.sha256(f"dbench {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
