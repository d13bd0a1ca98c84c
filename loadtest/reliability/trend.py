# SPDX-License-Identifier: Apache-2.0
"""Does a series of measurements grow? A slope that a few outliers cannot bend, and a bound on it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

AT_MOST = 400
"""Points a slope is taken from; more are thinned, the cost grows with their square."""


@dataclass(frozen=True)
class Bound:
    """How much a quantity may grow.

    Attributes:
        per_hour: this much per hour is always allowed.
        share: as is this share of its level over the whole series: a minute says little about an hour.
    """

    name: str
    unit: str
    per_hour: float
    share: float


@dataclass(frozen=True)
class TrendCheck:
    """What :func:`judge` found.

    Attributes:
        level: the median.
        slope: growth per hour; negative if it fell.
        allowed: the largest slope that passes as flat.
    """

    name: str
    unit: str
    level: float
    slope: float
    allowed: float
    points: int

    @property
    def flat(self) -> bool:
        """Whether it did not grow; a series of fewer than two points says nothing, which is not flat."""
        return self.points >= 2 and self.slope <= self.allowed

    def row(self) -> dict[str, Any]:
        """Of JSON."""
        return {**asdict(self), "flat": self.flat}

    def __str__(self) -> str:
        sign = "flat" if self.flat else "GROWS" if self.points >= 2 else "NOT MEASURED"
        return (
            f"{self.name}: {sign}, {self.level:.4g} {self.unit}, {self.slope:+.3g} per hour "
            f"(allowed {self.allowed:.3g})"
        )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes between all pairs of points (x, y)."""
    thin = points[:: max(1, math.ceil(len(points) / AT_MOST))]
    slopes = [
        (y2 - y1) / (x2 - x1)
        for i, (x1, y1) in enumerate(thin)
        for x2, y2 in thin[i + 1 :]
        if x2 != x1
    ]
    return statistics.median(slopes) if slopes else 0.0


def judge(bound: Bound, points: Sequence[tuple[float, float]]) -> TrendCheck:
    """Hold the growth of ``points`` (hours, value) against ``bound``."""
    if len(points) < 2:
        return TrendCheck(bound.name, bound.unit, math.nan, math.nan, bound.per_hour, len(points))
    level = statistics.median(y for _, y in points)
    hours = points[-1][0] - points[0][0]
    allowed = max(bound.per_hour, bound.share * abs(level) / hours) if hours > 0 else 0.0
    grown = slope(points)
    if not bound.per_hour and not bound.share:
        # What must be zero is held against its worst, not its slope.
        grown = max(y for _, y in points)
        allowed = 0.0
    return TrendCheck(bound.name, bound.unit, level, grown, allowed, len(points))
