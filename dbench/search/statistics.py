"""Statistics of one trial: how many values a quantile forgives, and whether latencies grow while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbench.search.sla import Rule

NUM_BLOCKS = 20
NUM_BLOCKS_OF_FEW = 10
FEW = 200
"""Fewer values than this are cut into NUM_BLOCKS_OF_FEW blocks."""
VALUES_PER_BLOCK = 2
"""At least; a line through fewer values than that says nothing of a trend."""

MAX_CORRELATION = 0.9
T_LIMIT = 1.73
"""One-sided 95% of Student's t with 18 degrees of freedom."""
RISE_LIMIT = 0.25
"""Of the rule's threshold, over the judged window."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Growth:
    """A straight line through a trial's block means."""

    t: float
    """Slope over its standard error, which allows for correlated neighbours; inf for an exact line upwards."""
    rise: float
    """Slope times the judged window, in the unit of the values."""

    def breaks(self, threshold: float) -> bool:
        """Whether the trial fails by growth: a rise that is no accident and matters beside the limit.

        Measured against the limit and not against the trial's own median, for lengths that drift at low load
        move a small median by more than a quarter.
        """
        return self.t > T_LIMIT and self.rise > RISE_LIMIT * threshold


def max_beyond(q: float, count: int) -> int:
    """How many of `count` values may lie beyond a limit that their q-quantile keeps: count - ceil(q count)."""
    return count - math.ceil(q * count - _ROUNDING)


def is_lost(rule: Rule, num_judged: int, seen: Iterable[float]) -> bool:
    """Whether an upper limit on a quantile is broken for certain, whatever the rest of the trial brings.

    `seen` are the values of judged requests that have ended, inf for failed ones, and the ages of those
    still in the system, which can only grow.
    """
    if rule.quantile is None or not rule.wants_less:
        return False
    return sum(not rule.holds(value) for value in seen) > max_beyond(rule.quantile, num_judged)


def growth(intended_s: ArrayLike, values: ArrayLike) -> Growth | None:
    """The trend of the values over their intended times, both in intended order.

    Least squares over the means of equal blocks against their mid times. The standard error of the slope is
    widened by sqrt((1 + r) / (1 - r)), r the lag-1 autocorrelation of the residuals within [0, 0.9]. Failed
    requests (inf or nan) are for other rules and left out. None for fewer than VALUES_PER_BLOCK values per block,
    or no time between them.
    """
    times, finite = np.asarray(intended_s, np.float64), np.asarray(values, np.float64)
    known = np.isfinite(finite)
    times, finite = times[known], finite[known]
    num_blocks = NUM_BLOCKS if finite.size >= FEW else NUM_BLOCKS_OF_FEW
    if finite.size < VALUES_PER_BLOCK * num_blocks or times[-1] <= times[0]:
        return None
    mids = np.array([(part[0] + part[-1]) / 2 for part in np.array_split(times, num_blocks)])
    means = np.array([part.mean() for part in np.array_split(finite, num_blocks)])
    offsets = mids - mids.mean()
    spread = float(offsets @ offsets)
    if spread == 0:
        return None
    slope = float(offsets @ means) / spread
    residuals = means - means.mean() - slope * offsets
    error = math.sqrt(float(residuals @ residuals) / (num_blocks - 2) / spread) * _inflation(residuals)
    t = slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0
    return Growth(t, slope * float(times[-1] - times[0]))


def _inflation(residuals: NDArray[np.float64]) -> float:
    power = float(residuals @ residuals)
    correlation = float(residuals[:-1] @ residuals[1:]) / power if power > 0 else 0.0
    r = min(max(correlation, 0.0), MAX_CORRELATION)
    return math.sqrt((1 + r) / (1 - r))
