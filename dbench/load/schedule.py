"""The whole list of requests of a run, drawn before the first one is sent.

Arrivals, lengths, prompts and warm-up have random streams of their own, all from the run's one seed:
another QPS scales the times and changes nothing else; more requests continue the same draws.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import islice

import numpy as np

from dbench.errors import TraceError
from dbench.events import LoadDrawn
from dbench.load.arrivals import arrival_times
from dbench.load.lengths import (
    FittedLengths,
    LengthRules,
    PromptSource,
    fit,
    ignores_eos,
    length_source,
    prompt_source,
    request_seed,
    scales_of,
)
from dbench.load.questions import Question, Questions, questions_for
from dbench.load.target import LoadRequest, SamplingParameters, TargetInfo
from dbench.load.traces import LengthPair, TaskTrace, Trace
from dbench.options import LoadOptions, SamplingOptions

log = logging.getLogger(__name__)


class Stream(IntEnum):
    """Random streams of a run; the numbers are part of what a seed means."""

    ARRIVALS = 0
    LENGTHS = 1
    PROMPTS = 2
    WARMUP_LENGTHS = 3
    WARMUP_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request and when it is due."""

    offset_s: float
    """After the first one; 0 in a closed loop, where the end of another request decides."""
    request: LoadRequest


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run sends."""

    warmup: tuple[LoadRequest, ...]
    """Index -1, -2, ..."""
    measured: tuple[ScheduledRequest, ...]
    """Index 0, 1, ..."""
    tail: Iterator[ScheduledRequest]
    """Further draws of the same processes, without an end; a row that cannot fit is left out."""
    drawn: LoadDrawn
    check_with: Questions | None = None
    """What answers are checked by; None: they are not."""


def draw_schedule(load: LoadOptions, sampling: SamplingOptions, info: TargetInfo) -> Schedule:
    """Draw every request for a target.

    Raises OptionError, TraceError or ModelError (a tokenizer that cannot be used) before anything is sent.
    """
    rules = length_rules(load, info)
    trace = length_source(load)
    drafts = _Drafts(trace, questions_for(info) if isinstance(trace, TaskTrace) else None, load)
    builder = _Builder(
        prompts=prompt_source(info.vocabulary_size, info.reserved_token_ids, load.seed),
        sampling=sampling_parameters(sampling),
        ignore_eos=ignores_eos(load),
        seed=load.seed,
    )
    times = arrival_times(load.interval_type, load.qps, load.cv, _generator(load.seed, Stream.ARRIVALS))
    stream = drafts.of(Stream.LENGTHS)
    fitted = [_fit(draft, rules) for draft in islice(stream, load.num_requests)]
    measured = tuple(
        ScheduledRequest(next(times) if load.concurrency is None else 0.0, builder.build(index, draft))
        for index, draft in enumerate(fitted)
    )
    num_warmup = info.num_workers if load.num_warmup_requests is None else load.num_warmup_requests
    warmup_drafts = _fitting(drafts.of(Stream.WARMUP_LENGTHS), rules)
    warmup = tuple(builder.build(-1 - n, draft) for n, draft in enumerate(islice(warmup_drafts, num_warmup)))
    drawn = _describe(load, rules, trace, [draft.lengths for draft in fitted], builder, num_warmup)
    tail = _tail(load, times, _fitting(stream, rules), builder)
    return Schedule(warmup, measured, tail, drawn, drafts.questions if load.check_answers else None)


def length_rules(load: LoadOptions, info: TargetInfo) -> LengthRules:
    """The limits of options and target together. Raises OptionError."""
    prompt_scale, gen_scale = scales_of(load)
    return LengthRules(
        prompt_scale=prompt_scale,
        gen_scale=gen_scale,
        block_length=info.block_length,
        max_total_tokens=info.max_model_len if load.max_total_tokens is None else load.max_total_tokens,
        max_model_len=info.max_model_len,
        max_gen_len=info.max_gen_len,
    )


def sampling_parameters(options: SamplingOptions) -> SamplingParameters:
    """The unmasking rule of every request, with defaults filled in; the target checks it."""
    return SamplingParameters(**asdict(options)).with_defaults()


Draft = LengthPair | Question
"""What a request will be: random ids of some length, or a question."""


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A draft with the lengths that the target takes."""

    lengths: FittedLengths
    question: Question | None


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Where drafts come from: a trace, in the words of the target's model where it asks something."""

    trace: Trace
    questions: Questions | None
    load: LoadOptions

    def of(self, stream: Stream) -> Iterator[Draft]:
        """Drafts without an end."""
        generator = _generator(self.load.seed, stream)
        if not isinstance(self.trace, TaskTrace):
            return self.trace.pairs(generator, shuffle=self.load.shuffle)
        assert self.questions is not None, "problems are asked in words"
        is_measured = stream is Stream.LENGTHS  # then request i asks problem i of the run's own seed
        seed = self.load.seed if is_measured else int(generator.integers(2**63))
        return self.questions.ask(self.trace.problems(seed))


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes requests out of drafts."""

    prompts: PromptSource
    sampling: SamplingParameters
    ignore_eos: bool
    seed: int

    def build(self, index: int, draft: _Fitted) -> LoadRequest:
        question, lengths = draft.question, draft.lengths
        return LoadRequest(
            index=index,
            prompt_token_ids=question.prompt_token_ids if question else self._random_ids(index, lengths.prompt_len),
            gen_length=lengths.gen_len,
            sampling=self.sampling,
            request_seed=request_seed(self.seed, index),
            ignore_eos=self.ignore_eos,
            problem=question.problem if question else None,
        )

    def _random_ids(self, index: int, length: int) -> tuple[int, ...]:
        stream, place = (Stream.PROMPTS, index) if index >= 0 else (Stream.WARMUP_PROMPTS, -1 - index)
        return self.prompts.prompt(stream, place, length)


def _generator(seed: int, stream: Stream) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream,))))


def _fit(draft: Draft, rules: LengthRules) -> _Fitted:
    """Raises TraceError for a draft that cannot fit, and for a question that would only fit if it were cut."""
    if isinstance(draft, LengthPair):
        return _Fitted(fit(draft, rules), None)
    lengths = fit(draft.lengths, rules)
    if lengths.was_shortened:
        raise TraceError(
            f"a problem of {draft.lengths.prompt_len} prompt tokens with {lengths.gen_len} tokens to generate does not "
            f"fit into max_total_tokens {rules.max_total_tokens} and cannot be cut; raise the limit"
        )
    return _Fitted(lengths, draft)


def _fitting(drafts: Iterator[Draft], rules: LengthRules) -> Iterator[_Fitted]:
    """For requests that no one counts: those that cannot fit are left out."""
    for draft in drafts:
        try:
            yield _fit(draft, rules)
        except TraceError:
            continue


def _tail(
    load: LoadOptions, times: Iterator[float], drafts: Iterator[_Fitted], builder: _Builder
) -> Iterator[ScheduledRequest]:
    if load.concurrency is None and math.isinf(load.qps):
        return  # all at once: nothing comes later
    for place, draft in enumerate(drafts):
        offset_s = next(times) if load.concurrency is None else 0.0
        yield ScheduledRequest(offset_s, builder.build(load.num_requests + place, draft))


def _describe(
    load: LoadOptions,
    rules: LengthRules,
    trace: Trace,
    fitted: list[FittedLengths],
    builder: _Builder,
    num_warmup: int,
) -> LoadDrawn:
    num_repeated = max(0, len(fitted) - (trace.num_rows or len(fitted)))
    if num_repeated:
        log.warning(
            "trace %s has %d rows for %d requests: rows are used again", trace.name, trace.num_rows, len(fitted)
        )
    return LoadDrawn(
        at_s=time.monotonic(),
        source="client",
        seed=load.seed,
        arrivals=describe_arrivals(load),
        lengths=describe_lengths(load, trace, rules),
        trace=trace.name,
        sampling=describe_sampling(builder.sampling),
        ignore_eos=builder.ignore_eos,
        block_length=rules.block_length,
        max_total_tokens=rules.max_total_tokens,
        num_rounded=sum(f.was_rounded for f in fitted),
        num_shortened=sum(f.was_shortened for f in fitted),
        num_repeated=num_repeated,
        num_warmup=num_warmup,
        notes=trace.notes,
        checks_answers=load.check_answers,
    )


def describe_arrivals(load: LoadOptions) -> str:
    """Such as "poisson, 2 requests/s"."""
    if load.concurrency is not None:
        return f"closed loop, {load.concurrency} in flight"
    if math.isinf(load.qps):
        return "all at once"
    process = f"gamma with cv {load.cv:g}" if load.interval_type == "gamma" else load.interval_type
    return f"{process}, {load.qps:g} requests/s"


def describe_lengths(load: LoadOptions, trace: Trace, rules: LengthRules) -> str:
    """Such as "trace arxiv, prompt x0.05, gen x0.05, in random order"."""
    if not trace.name:
        return f"fixed, prompt {load.prompt_tokens}, gen {load.gen_tokens}"
    if isinstance(trace, TaskTrace):
        return f"trace {trace.name}, one problem as one chat message"
    scales = f"prompt x{rules.prompt_scale:g}, gen x{rules.gen_scale:g}"
    if trace.num_rows is None:
        return f"trace {trace.name}, {scales}"
    return f"trace {trace.name}, {scales}, in {'random' if load.shuffle else 'file'} order"


def describe_sampling(sampling: SamplingParameters) -> str:
    """Such as "conf_threshold 0.9, temperature 0"."""
    rule = " ".join([sampling.unmasking_strategy, *(f"{value:g}" for value in sampling.parameters().values())])
    return f"{rule}, temperature {sampling.temperature:g}"
