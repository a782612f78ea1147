"""The settings that are compared: the default, and what differs from it in one respect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dbench.unmasking_rules import DEFAULT_RULE

DEFAULT_THRESHOLD = 0.9
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, DEFAULT_THRESHOLD, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode."""

    group: str
    """What is varied: threshold, rule, block length or cache."""
    name: str
    options: Mapping[str, object]
    """Options of `dbench run`."""


def rule(strategy: str, group: str = "rule", **parameter: float) -> Setting:
    """An unmasking rule and the value of its parameter, if it has one."""
    name = " ".join([strategy, *(f"{value:g}" for value in parameter.values())])
    return Setting(group, name, {"unmasking_strategy": strategy, **parameter})


def threshold(value: float) -> Setting:
    return rule(DEFAULT_RULE, "threshold", confidence_threshold=value)


DEFAULT = threshold(DEFAULT_THRESHOLD)

SETTINGS: tuple[Setting, ...] = (
    *(threshold(value) for value in THRESHOLDS),
    rule("conf_quota", fixed_unmask_quota=1),
    rule("conf_quota", fixed_unmask_quota=4),
    rule("conf_dynamic", dynamic_unmask_factor=1.0),
    rule("entropy", entropy_threshold=0.3),
    rule("margin", margin_threshold=0.8),
    rule("random"),
    *(Setting("block length", f"blocks of {length}", {"block_length": length}) for length in (8, 16)),
    Setting("cache", "no cache", {"cache_mode": "none"}),
)
"""In the order of the table; a block length of 32 and the exact cache are those of the default."""
