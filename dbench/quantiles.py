"""What a percentile is in dbench, once: tables, plots, live views and SLA verdicts all ask here.

The q-quantile of N values is the ceil(qN)-th smallest of them: always a value that occurred, and with
failures as +inf a run cannot improve its tail by failing. Over time the same holds, with durations
instead of counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_ROUNDING = 1e-9  # 0.07 * 100 is 7.000000000000001, and means the 7th


def quantile(values: ArrayLike, q: float) -> float:
    """The ceil(qN)-th smallest of all N values, +inf included. Raises ValueError for none, or for a NaN."""
    return quantiles(values, (q,))[0]


def quantiles(values: ArrayLike, qs: Sequence[float]) -> list[float]:
    """`quantile` for several q with one pass over the values."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("a quantile of no values")
    if np.isnan(array).any():
        raise ValueError("a quantile of values that hold a NaN")
    ranks = [_rank(q, array.size) for q in qs]
    ordered = np.partition(array, sorted({rank - 1 for rank in ranks}))
    return [float(ordered[rank - 1]) for rank in ranks]


def time_weighted_quantile(values: ArrayLike, durations: ArrayLike, q: float) -> float:
    """The smallest value whose cumulated duration reaches q of the whole. Raises ValueError if that is no time."""
    array, weights = _weighted(values, durations)
    order = np.argsort(array, kind="stable")
    cumulated = np.cumsum(weights[order])
    reached = cumulated >= q * cumulated[-1] * (1 - _ROUNDING)
    return float(array[order][int(np.argmax(reached & (weights[order] > 0)))])


def time_weighted_mean(values: ArrayLike, durations: ArrayLike) -> float:
    """The mean over time. Raises ValueError if that is no time."""
    array, weights = _weighted(values, durations)
    return float(np.dot(array, weights) / weights.sum())


def cumulative_distribution(values: ArrayLike, num_points: int) -> tuple[Floats, Floats]:
    """(shares, values) of the distribution's steps: all, or those at `num_points` evenly spaced quantiles.

    The last share is below 1 where some values are +inf. Raises ValueError as `quantile` does.
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    if np.isnan(array).any():
        raise ValueError("a distribution of values that hold a NaN")
    num_finite = int(np.searchsorted(array, np.inf, side="left"))
    ranks = np.ceil(np.linspace(0.0, 1.0, num_points) * array.size - _ROUNDING).astype(np.int64)
    ranks = np.unique(np.clip(ranks, 1, num_finite)) if num_finite else ranks[:0]
    return ranks / max(1, array.size), array[ranks - 1]


def _rank(q: float, count: int) -> int:
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile lies between 0 and 1, got {q}")
    return max(1, math.ceil(q * count - _ROUNDING))


def _weighted(values: ArrayLike, durations: ArrayLike) -> tuple[Floats, Floats]:
    array = np.asarray(values, dtype=np.float64)
    weights = np.asarray(durations, dtype=np.float64)
    if weights.sum() <= 0:
        raise ValueError("a time-weighted figure over no time")
    return array, weights
