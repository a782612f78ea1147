"""What is decoded: requests, the block that is sent to a worker, and what comes back.

canvas  = prompt + masks; block = `block_length` consecutive generated positions.
A position is an index into the canvas. Between blocks a request's whole state is its token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dbench.errors import unknown_name
from dbench.unmasking_rules import DEFAULT_RULE, MAX_TEMPERATURE, RULE_PARAMETERS, UNMASKING_RULES, UnmaskingRule


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
    """The unmasking rule, its one parameter, and the temperature; other rules' parameters are unset."""

    unmasking_strategy: str = DEFAULT_RULE
    """A key of UNMASKING_RULES."""
    temperature: float = 0.0
    confidence_threshold: float | None = None
    fixed_unmask_quota: int | None = None
    dynamic_unmask_factor: float | None = None
    entropy_threshold: float | None = None
    margin_threshold: float | None = None

    @property
    def rule(self) -> UnmaskingRule:
        """The record of the rule; KeyError for an unknown one."""
        return UNMASKING_RULES[self.unmasking_strategy]

    @property
    def parameter(self) -> float | int | None:
        """The value of the rule's own parameter, its default if unset; None for a rule without one."""
        own = self.rule.parameter
        if own is None:
            return None
        value = self._values()[own.name]
        return own.default if value is None else value

    @property
    def fewest_per_step(self) -> int:
        """Positions that every step is sure to fix while so many are masked; the host can count on them unseen."""
        return int(self.parameter or 1) if self.rule.fixes_its_parameter else 1

    def with_defaults(self) -> SamplingParameters:
        """The rule's own parameter filled in where it is unset and has a default; foreign ones stay."""
        rule = UNMASKING_RULES.get(self.unmasking_strategy)
        if rule is None or rule.parameter is None or rule.parameter.default is None:
            return self
        given: dict[str, Any] = {rule.parameter.name: self.parameter}
        return replace(self, **given)

    def parameters(self) -> dict[str, float | int]:
        """The rule parameters that are set, by field name."""
        return {name: value for name, value in self._values().items() if value is not None}

    def fault(self, place: Callable[[str], str] = str) -> str:
        """One line for what is wrong, empty if nothing is: a rule needs exactly its own parameter, in range.

        `place` turns a field's name into what the line calls it.
        """
        strategy, rule = self.unmasking_strategy, UNMASKING_RULES.get(self.unmasking_strategy)
        if rule is None:
            return unknown_name(place("unmasking_strategy"), strategy, UNMASKING_RULES)
        own, given = rule.parameter, self.with_defaults().parameters()
        for name, value in given.items():
            if own is None or name != own.name:
                takes = f"takes {place(own.name)} only" if own else "takes no parameter"
                return f"{place(name)} {value} does not belong to {strategy}, which {takes}; leave it out"
        if own is not None and own.name not in given:
            return f"{place('unmasking_strategy')} {strategy} needs {place(own.name)}, {own.range_text}; give it"
        if own is not None and not own.allows(given[own.name]):
            return f"{place(own.name)} is {given[own.name]}, wanted {own.range_text}"
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            return f"{place('temperature')} is {self.temperature}, wanted 0 to {MAX_TEMPERATURE:g}"
        return ""

    def _values(self) -> dict[str, float | int | None]:
        return {
            "confidence_threshold": self.confidence_threshold,
            "fixed_unmask_quota": self.fixed_unmask_quota,
            "dynamic_unmask_factor": self.dynamic_unmask_factor,
            "entropy_threshold": self.entropy_threshold,
            "margin_threshold": self.margin_threshold,
        }


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
    alone: bool = False
    """It runs without any other block beside it: a batch that it was in has failed as a whole."""

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
    `decode_start_s` is the start of the first decode step's batch (= refresh_end_s without one);
    `end_s` is the completion of the last batch that held a span of it, void or not: its pages come back then.
    Of a block that was refreshed elsewhere the first three are the arrival of its last layer.
    """

    received_s: float
    refresh_start_s: float
    refresh_end_s: float
    decode_start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RefreshTimes:
    """When another worker refreshed a block and began to send its KV, in seconds of that worker's monotonic clock."""

    worker_id: int
    received_s: float
    refresh_start_s: float
    refresh_end_s: float
    transfer_start_s: float


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh on another worker has fixed; masks are left in the block."""

    positions: tuple[int, ...]
    """Canvas positions, ascending."""
    token_ids: tuple[int, ...]
    times: RefreshTimes


@dataclass(frozen=True, slots=True)
class BlockStep:
    """One forward pass of one block: when it ended and how many returned tokens it fixed."""

    end_s: float
    num_unmasked: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The KV of a block has been sent, and its pages are free where it was refreshed."""

    key: BlockKey
    epoch: int
    """Of the link that it went over."""


class BlockOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Fault(StrEnum):
    """Whose failure it was that a block FAILED."""

    NONE = ""
    """Nothing failed."""
    OWN = "own"
    """The block's: it would fail like this anywhere, so it is not tried again."""
    BATCH = "batch"
    """Some block's of the batch, or the device's: only where the block was alone can it have been its own."""
    WORKER = "worker"
    """The worker's: it was lost, or did not do what it was told."""
    TRANSFER = "transfer"
    """That of the worker at the other end of a KV transfer, or of the link to it."""
    LINK = "link"
    """That of a link which had broken before the block was to go over it."""
    NOBODY = "nobody"
    """Its worker was drained and handed it back, or was lost when its part was done."""

    @property
    def ends_link(self) -> bool:
        """Nothing more goes over the link between the block's two workers."""
        return self in (Fault.TRANSFER, Fault.LINK)


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
    fault: Fault = Fault.NONE
    """FAILED: never NONE."""
    refreshed_elsewhere: RefreshTimes | None = None
    """On the clock of the worker that did; the end of the first step is then the arrival of the KV."""
    link_epoch: int = 0
    """FAILED over a link: which; 0 otherwise. The block may be given another one before this is heard."""

    @staticmethod
    def without_steps(
        key: BlockKey, outcome: BlockOutcome, error: str = "", fault: Fault = Fault.NONE, link_epoch: int = 0
    ) -> BlockEnd:
        """The end of a block that never ran, or of which nothing was heard."""
        return BlockEnd(key, outcome, (), False, error, None, (), fault, link_epoch=link_epoch)


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
        **{name: RULE_PARAMETERS[name].kind(value) for name, value in filled.parameters().items()},
    }
    digest = hashlib.sha256(json.dumps(form, sort_keys=True, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
