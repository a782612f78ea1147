"""The unmasking rules by name: what each one is told, and what the host may count on without seeing its scores.

Options, wire, validation, policy and schedules read these records; the rules themselves are `RULES` in
`serve/unmask.py`. A parameter is called the same in SamplingOptions, SamplingParameters and the message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Measure(StrEnum):
    """What a rule orders masked rows by, from the softmax of the noise-free logits without the mask id."""

    CONFIDENCE = "confidence"
    """Probability of the proposed token."""
    ENTROPY = "entropy"
    """In nats; the smallest is the surest."""
    MARGIN = "margin"
    """Largest probability minus the second largest."""


@dataclass(frozen=True, slots=True)
class RuleParameter:
    """A number that a rule is told."""

    name: str
    kind: type[int] | type[float]
    help: str
    default: float | int | None = None
    """None: a request must bring it."""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    def allows(self, value: float | int) -> bool:
        """The value is a finite number in range."""
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    @property
    def range_text(self) -> str:
        """Such as 'above 0 and at most 1'."""
        limits = (("at least", self.minimum), ("above", self.above), ("at most", self.maximum))
        return " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class UnmaskingRule:
    """One way to choose the masked rows of a block that a step fixes."""

    name: str
    parameter: RuleParameter | None
    """The one number that it needs."""
    measure: Measure | None
    """None: it looks at no score."""
    fixes_its_parameter: bool = False
    """Every step fixes as many rows as the parameter says, or all that are left: the host can count them unseen."""


MAX_OPEN_PARAMETER = 1e6
"""Of a parameter whose meaning sets no limit: far beyond the value that fixes every row, far below where the runner's
float32 overflows and takes the batch along."""

UNMASKING_RULES: dict[str, UnmaskingRule] = {
    rule.name: rule
    for rule in (
        UnmaskingRule(
            "conf_threshold",
            RuleParameter(
                "confidence_threshold",
                float,
                "conf_threshold: fix every position at least this sure.",
                default=0.9,
                above=0,
                maximum=1,
            ),
            Measure.CONFIDENCE,
        ),
        UnmaskingRule(
            "conf_quota",
            RuleParameter("fixed_unmask_quota", int, "conf_quota: positions fixed per step.", minimum=1),
            Measure.CONFIDENCE,
            fixes_its_parameter=True,
        ),
        UnmaskingRule(
            "conf_dynamic",
            RuleParameter(
                "dynamic_unmask_factor",
                float,
                "conf_dynamic: fix the n surest positions while the n-th is at least 1 - factor/(n+1) sure.",
                above=0,
                maximum=MAX_OPEN_PARAMETER,
            ),
            Measure.CONFIDENCE,
        ),
        UnmaskingRule("random", None, None),
        UnmaskingRule(
            "entropy",
            RuleParameter(
                "entropy_threshold",
                float,
                "entropy: fix every position of at most this entropy, in nats.",
                minimum=0,
                maximum=MAX_OPEN_PARAMETER,
            ),
            Measure.ENTROPY,
        ),
        UnmaskingRule(
            "margin",
            RuleParameter(
                "margin_threshold",
                float,
                "margin: fix every position whose two likeliest tokens are at least this far apart in probability.",
                minimum=0,
                maximum=1,
            ),
            Measure.MARGIN,
        ),
    )
}

DEFAULT_RULE = "conf_threshold"

MAX_TEMPERATURE = 1e6
"""Logits are then lost in the noise; far above, float32 overflows and every proposal is token 0."""

RULE_PARAMETERS: dict[str, RuleParameter] = {
    rule.parameter.name: rule.parameter for rule in UNMASKING_RULES.values() if rule.parameter is not None
}
"""By name, in the order of the rules."""
