"""Which requests a server takes: every check on what a client sent, before it becomes a Request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dbench.errors import RequestError
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What bounds a request on this server."""

    block_length: int
    max_gen_len: int | None
    """Masks that every canvas carries; None: each request's gen_length."""
    max_model_len: int
    """Longest canvas."""
    vocabulary_size: int
    kv_max_pages: int | None
    """None: not known yet."""
    kv_page_size: int

    @property
    def pool_tokens(self) -> float:
        return math.inf if self.kv_max_pages is None else self.kv_max_pages * self.kv_page_size

    def num_masks(self, gen_length: int) -> int:
        """Masks of the canvas of a request."""
        return gen_length if self.max_gen_len is None else self.max_gen_len


def check_submission(submission: Submission, limits: RequestLimits) -> None:
    """Raises RequestError, one line with the numbers, for a request that this server cannot run."""
    _check_gen_length(submission.gen_length, limits)
    _check_prompt(submission.prompt_token_ids, limits.vocabulary_size)
    _check_canvas(len(submission.prompt_token_ids), submission.gen_length, limits)
    check_sampling(submission.sampling)
    seed = submission.request_seed
    if seed is not None and not INT64_MIN <= seed <= INT64_MAX:
        raise RequestError(f"request_seed {seed} is no int64; send {INT64_MIN} to {INT64_MAX}, or none")


def check_sampling(sampling: SamplingParameters) -> None:
    """A rule needs exactly its own parameter, in range. Raises RequestError."""
    fault = sampling.fault()
    if fault:
        raise RequestError(fault)


def _check_gen_length(gen_length: int, limits: RequestLimits) -> None:
    block = limits.block_length
    if gen_length < 1 or gen_length % block:
        near = max(block, math.ceil(gen_length / block) * block)
        raise RequestError(
            f"gen_length {gen_length} is no positive multiple of the server's block_length {block}; send {near}"
        )
    if limits.max_gen_len is not None and gen_length > limits.max_gen_len:
        raise RequestError(f"gen_length {gen_length} exceeds the server's max_gen_len {limits.max_gen_len}")


def _check_prompt(prompt: tuple[int, ...], vocabulary_size: int) -> None:
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token id")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocabulary_size:
        bad = lowest if lowest < 0 else highest
        position = prompt.index(bad)
        raise RequestError(
            f"prompt_token_ids[{position}] is {bad}, outside the vocabulary of 0 to {vocabulary_size - 1}; "
            "use the model's own tokenizer"
        )


def _check_canvas(num_prompt_tokens: int, gen_length: int, limits: RequestLimits) -> None:
    num_masks = limits.num_masks(gen_length)
    canvas = num_prompt_tokens + num_masks
    parts = f"{num_prompt_tokens} prompt tokens + {num_masks} masks = {canvas}"
    if canvas > limits.max_model_len:
        raise RequestError(f"{parts} exceed the context limit of {limits.max_model_len}; shorten the prompt")
    if canvas > limits.pool_tokens:
        pool = f"{limits.kv_max_pages} pages x {limits.kv_page_size} = {limits.pool_tokens} tokens"
        raise RequestError(f"{parts} exceed the KV pool of a worker, {pool}; shorten the prompt or raise kv_max_pages")
