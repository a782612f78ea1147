"""Arrival processes: tables of gaps with mean 1, scaled by the rate.

A gap is drawn without knowing the rate, so a seed gives the same draws at every QPS, scaled in time.
Gaps are never rescaled to hit the nominal rate: a Poisson run of 100 requests has the rate it drew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from dbench.errors import OptionError, unknown_name

GapDraw = Callable[[np.random.Generator, float, int], NDArray[np.float64]]
GAPS_PER_CHUNK = 256


def poisson(generator: np.random.Generator, cv: float, count: int) -> NDArray[np.float64]:
    """Exponential gaps; `cv` is not used."""
    return generator.standard_exponential(count)


def gamma(generator: np.random.Generator, cv: float, count: int) -> NDArray[np.float64]:
    """Gamma gaps of mean 1 and coefficient of variation `cv`: shape 1/cv^2, scale cv^2."""
    shape = 1.0 / (cv * cv)
    return generator.standard_gamma(shape, count) / shape


def static(generator: np.random.Generator, cv: float, count: int) -> NDArray[np.float64]:
    """Gaps of exactly 1; draws nothing."""
    return np.ones(count)


ARRIVALS: dict[str, GapDraw] = {"poisson": poisson, "gamma": gamma, "static": static}
"""interval_type -> `count` gaps of mean 1."""


def arrival_times(interval_type: str, qps: float, cv: float, generator: np.random.Generator) -> Iterator[float]:
    """Intended sends in seconds after the first one, which is at 0; without an end.

    Request n comes at the sum of the first n gaps divided by `qps`; qps = inf puts all at 0.
    Raises OptionError for an interval_type that the table does not hold.
    """
    draw = ARRIVALS.get(interval_type)
    if draw is None:
        raise OptionError(unknown_name("interval_type", interval_type, ARRIVALS))
    return _times(draw, qps, cv, generator)


def _times(draw: GapDraw, qps: float, cv: float, generator: np.random.Generator) -> Iterator[float]:
    elapsed = 0.0  # in mean gaps
    yield 0.0
    while True:
        for gap in draw(generator, cv, GAPS_PER_CHUNK).tolist():
            elapsed += gap
            yield 0.0 if math.isinf(qps) else elapsed / qps
