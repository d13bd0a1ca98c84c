# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals by the bootstrap: samples are drawn again with replacement. Pure.

Percentile intervals (Efron and Tibshirani 1993, chapter 13). A comparison draws *pairs*: each time the same
samples of both sides, for it is the differences between samples that make either side alone uncertain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Figure", "difference", "mean", "ratio"]

DRAWS = 4000
LEVEL = 0.95
SEED = 20261120


class Figure(NamedTuple):
    """A number and the interval it lies in with a confidence of :data:`LEVEL`."""

    value: float
    low: float
    high: float
    samples: int


def mean(values: Sequence[float]) -> Figure:
    """The mean of ``values``."""
    drawn = _drawn(values)
    return _figure(float(np.mean(values)), drawn.mean(axis=1), len(values))


def difference(values: Sequence[float], base: Sequence[float]) -> Figure:
    """Mean of ``values`` minus mean of ``base``; item ``i`` of both is the same sample."""
    return mean(np.subtract(values, base).tolist())


def ratio(values: Sequence[float], base: Sequence[float]) -> Figure:
    """Mean of ``values`` over mean of ``base``; item ``i`` of both is the same sample.

    Draws in which the base is zero have no ratio and are left out; if all are, the figure is NaN.
    """
    if len(values) != len(base):
        raise ValueError(f"{len(values)} values against {len(base)}")
    if not np.mean(base):
        return Figure(float("nan"), float("nan"), float("nan"), len(values))
    below = _drawn(base).mean(axis=1)
    kept = below != 0
    above = _drawn(values).mean(axis=1)
    return _figure(float(np.mean(values) / np.mean(base)), above[kept] / below[kept], len(values))


def _drawn(values: Sequence[float]) -> np.ndarray:
    """[DRAWS, len(values)]; equally long sequences are drawn alike."""
    places = np.random.default_rng(SEED).integers(len(values), size=(DRAWS, len(values)))
    return np.asarray(values, dtype=float)[places]


def _figure(value: float, draws: np.ndarray, samples: int) -> Figure:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value, float(low), float(high), samples)
