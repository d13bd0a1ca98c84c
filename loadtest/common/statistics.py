# SPDX-License-Identifier: Apache-2.0
"""Quantiles, and confidence intervals by the bootstrap: samples are drawn again with replacement. Pure.

Percentile intervals (Efron and Tibshirani 1993, chapter 13). A comparison draws *pairs*: each time the same
samples of both sides, for it is the differences between samples that make either side alone uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000
LEVEL = 0.95
SEED = 20261120


class Estimate(NamedTuple):
    """A number and the interval it lies in with a confidence of :data:`LEVEL`."""

    value: float
    low: float
    high: float
    samples: int

    def scaled(self, scale: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * scale, self.low * scale, self.high * scale, self.samples)

    def shifted(self, by: float) -> Estimate:
        """Counted from another zero."""
        return Estimate(self.value + by, self.low + by, self.high + by, self.samples)


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share`` quantile (0..1) as numpy has it; NaN of nothing."""
    return float(np.quantile(values, share)) if len(values) else math.nan


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """A quarter, the median, three quarters."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def mean(values: Sequence[float]) -> Estimate:
    """The mean of ``values``."""
    return _estimate(float(np.mean(values)), _drawn(values).mean(axis=1), len(values))


def ratio(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Mean of ``values`` over mean of ``base``; item ``i`` of both is the same sample.

    Draws in which the base is zero have no ratio and are left out; if all are, the figure is NaN.

    Raises:
        ValueError: one has more items than the other.
    """
    if len(values) != len(base):
        raise ValueError(f"{len(values)} values against {len(base)}")
    if not np.mean(base):
        return Estimate(math.nan, math.nan, math.nan, len(values))
    below = _drawn(base).mean(axis=1)
    kept = below != 0
    above = _drawn(values).mean(axis=1)
    return _estimate(float(np.mean(values) / np.mean(base)), above[kept] / below[kept], len(values))


def _drawn(values: Sequence[float]) -> NDArray[np.float64]:
    """[DRAWS, len(values)]; equally long sequences are drawn alike."""
    places = np.random.default_rng(SEED).integers(len(values), size=(DRAWS, len(values)))
    drawn: NDArray[np.float64] = np.asarray(values, dtype=np.float64)[places]
    return drawn


def _estimate(value: float, draws: NDArray[np.float64], samples: int) -> Estimate:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), samples)
