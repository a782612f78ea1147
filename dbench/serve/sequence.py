"""What is decoded: requests, the block that is sent to a worker, and what comes back.

canvas  = prompt + masks; block = `block_length` consecutive generated positions.
A position is an index into the canvas. Between blocks a request's whole state is its token ids.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum

DEFAULT_CONFIDENCE_THRESHOLD = 0.9

STRATEGY_PARAMETER: dict[str, str | None] = {
    "conf_threshold": "confidence_threshold",
    "conf_quota": "fixed_unmask_quota",
    "random": None,
}
"""Unmasking strategy -> the one SamplingParameters field that it needs."""


class Status(StrEnum):
    """Where a request is; the last three are final and set exactly once."""

    PENDING = "PENDING"
    PREFILLING = "PREFILLING"
    WAITING_DECODE = "WAITING_DECODE"
    DECODING = "DECODING"
    WAITING_NEXT_BLOCK = "WAITING_NEXT_BLOCK"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in (Status.COMPLETED, Status.ERROR, Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The unmasking rule and its temperature."""

    unmasking_strategy: str = "conf_threshold"
    temperature: float = 0.0
    confidence_threshold: float | None = None
    fixed_unmask_quota: int | None = None

    def with_defaults(self) -> SamplingParameters:
        """conf_threshold without its parameter takes 0.9; nothing else has a default."""
        if self.unmasking_strategy == "conf_threshold" and self.confidence_threshold is None:
            return replace(self, confidence_threshold=DEFAULT_CONFIDENCE_THRESHOLD)
        return self

    def parameters(self) -> dict[str, float | int]:
        """The rule parameters that are set, by field name."""
        values = {"confidence_threshold": self.confidence_threshold, "fixed_unmask_quota": self.fixed_unmask_quota}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, after validation and with every default filled in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    gen_length: int
    sampling: SamplingParameters
    request_seed: int
    ignore_eos: bool
    arrival_s: float
    """The scheduler's monotonic clock."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Names one attempt at one block; a message with any other attempt is dropped."""

    request_id: str
    block_index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One block to decode: all that a worker gets to know of a request."""

    key: BlockKey
    token_ids: tuple[int, ...]
    """Prompt and finished blocks: the canvas up to the block's first position."""
    num_masks: int
    """Masks after `token_ids`, to the end of the canvas; at least block_length."""
    block_length: int
    sampling: SamplingParameters
    request_seed: int
    ignore_eos: bool
    arrival_s: float
    """Submission time of the request: the queue order of arrival_order."""
    num_remaining_blocks: int
    """Blocks still to decode, this one included: the queue order of fewest_remaining_blocks."""

    @property
    def block_start(self) -> int:
        return len(self.token_ids)

    @property
    def block_end(self) -> int:
        return len(self.token_ids) + self.block_length

    @property
    def canvas_length(self) -> int:
        return len(self.token_ids) + self.num_masks


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """When a block did what, in seconds of its worker's monotonic clock.

    `refresh_start_s` and `refresh_end_s` are the interval of the batch that held the refresh;
    `decode_start_s` is the start of the first decode step's batch (= refresh_end_s without one).
    """

    received_s: float
    refresh_start_s: float
    refresh_end_s: float
    decode_start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class BlockStep:
    """One forward pass of one block: when it ended and how many returned tokens it fixed."""

    end_s: float
    num_unmasked: int


class BlockOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """A block has ended on its worker, and its pages are free again."""

    key: BlockKey
    outcome: BlockOutcome
    token_ids: tuple[int, ...]
    """DONE: the block's ids, cut after the first end-of-text id unless ignore_eos; else empty."""
    found_eos: bool
    error: str
    """FAILED: one line naming block and step; else empty."""
    times: BlockTimes | None
    """None when the refresh never ran."""
    steps: tuple[BlockStep, ...]
    """In order, the refresh first; void spans are not steps. `num_unmasked` counts returned tokens only."""

    @staticmethod
    def without_steps(key: BlockKey, outcome: BlockOutcome, error: str = "") -> BlockEnd:
        """The end of a block that never ran, or of which nothing was heard."""
        return BlockEnd(key, outcome, (), False, error, None, ())


def derive_request_seed(
    prompt_token_ids: tuple[int, ...], gen_length: int, sampling: SamplingParameters, block_length: int
) -> int:
    """The int64 seed of a request that brings none: equal requests get equal randomness.

    SHA-256 over a canonical JSON of prompt ids, gen_length, sampling parameters with defaults filled in,
    and block_length; the first 8 bytes, big-endian, as a signed integer.
    """
    filled = sampling.with_defaults()
    form = {
        "block_length": block_length,
        "gen_length": gen_length,
        "prompt_token_ids": list(prompt_token_ids),
        "temperature": float(filled.temperature),
        "unmasking_strategy": filled.unmasking_strategy,
        **filled.parameters(),
    }
    digest = hashlib.sha256(json.dumps(form, sort_keys=True, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
