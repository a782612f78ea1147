"""The axis that a search moves on: request rates, compared by their ratio and never by their difference."""

from __future__ import annotations

import math

from dbench.errors import OptionError

LOWEST_QPS = 1e-6
HIGHEST_QPS = 1e6
"""Ends of the axis; one fixed range, so that every trial of every study lies on the same one."""

SIGNIFICANT_DIGITS = 6
"""Rates that a search chooses itself have this many digits, so that the printed number is the one that ran."""


def rounded(qps: float) -> float:
    """The rate with SIGNIFICANT_DIGITS digits."""
    return float(f"{qps:.{SIGNIFICANT_DIGITS}g}")


def midpoint(low: float, high: float) -> float:
    """The middle of two rates on the log axis; equal to one of them where the axis has no rate between."""
    return rounded(math.sqrt(low) * math.sqrt(high))


def is_within(low: float, high: float, granularity_pct: float) -> bool:
    """Whether high lies at most `granularity_pct` percent above low."""
    return high <= low * (1 + granularity_pct / 100)


def qps_name(qps: float) -> str:
    """The rate as a folder name and in messages: 0.25, 12, 1.41421."""
    return f"{qps:.12g}"


def parse_qps_list(text: str, where: str) -> tuple[float, ...]:
    """The rates of '1,2,4'. Raises OptionError naming `where` for anything else, and for a rate given twice."""
    rates: list[float] = []
    for part in text.split(","):
        rate = _number(part)
        if rate is None or not LOWEST_QPS <= rate <= HIGHEST_QPS:
            raise OptionError(
                f"{where}: got {part.strip()!r} in {text!r}, wanted rates between {LOWEST_QPS:g} and {HIGHEST_QPS:g} "
                "requests per second, such as 1,2,4"
            )
        if rate in rates:
            raise OptionError(f"{where}: {qps_name(rate)} is there twice in {text!r}; give each rate once")
        rates.append(rate)
    return tuple(rates)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
