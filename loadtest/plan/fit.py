# SPDX-License-Identifier: Apache-2.0
"""Step times as a linear function of the work, fitted to steps that were measured. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.plan.work import FEATURES, Work

__all__ = ["Linear", "MeasuredStep", "Residual", "fit", "residual"]


@dataclass(frozen=True)
class MeasuredStep:
    """What a step computed and how long it took."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Linear:
    """Seconds of a step: a constant, and a cost for each of :data:`.work.FEATURES`; none is negative."""

    constant: float
    costs: tuple[float, ...]

    def seconds(self, work: Work) -> float:
        """Of one step."""
        products = (cost * count for cost, count in zip(self.costs, work.values(), strict=True))
        return self.constant + sum(products)


@dataclass(frozen=True)
class Residual:
    """How well a fit meets the steps that it is of, as shares of what was measured.

    Attributes:
        total: all steps' predicted time over their measured time, minus 1.
        typical: the median of the single steps' errors, without sign.
        worst: their ninth decile.
    """

    steps: int
    total: float
    typical: float
    worst: float


def fit(steps: Sequence[MeasuredStep]) -> Linear:
    """Least squares of the errors relative to what was measured, with no negative cost.

    Of all subsets of the features the one whose unbounded solution is nowhere negative and has the smallest
    error: that is the bounded solution (the Karush-Kuhn-Tucker conditions name its support), and with so few
    features trying them all is quick. Features that no step has cost nothing.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("no steps to fit")
    measured = np.array([step.seconds for step in steps])
    counts = np.array([(1, *step.work.values()) for step in steps], dtype=np.float64)
    scale = np.maximum(counts.max(axis=0), 1)
    # Relative errors: each row over what was measured, which becomes 1.
    rows = counts / scale / measured[:, None]
    gram, target = rows.T @ rows, rows.sum(axis=0)
    present = [place for place in range(counts.shape[1]) if counts[:, place].any()]
    best, least = np.zeros(counts.shape[1]), float(len(steps))
    for size in range(1, len(present) + 1):
        for chosen in map(list, itertools.combinations(present, size)):
            found = _solve(gram, target, chosen)
            if found is None:
                continue
            error = len(steps) - 2 * float(found @ target) + float(found @ gram @ found)
            # A feature more has to be worth something beyond rounding.
            if error < least - 1e-9 * len(steps):
                best, least = found, error
    costs = (best / scale).tolist()
    return Linear(costs[0], tuple(costs[1:]))


def residual(linear: Linear, steps: Sequence[MeasuredStep]) -> Residual:
    """How well ``linear`` meets ``steps``."""
    measured = np.array([step.seconds for step in steps])
    predicted = np.array([linear.seconds(step.work) for step in steps])
    errors = np.abs(predicted / measured - 1)
    return Residual(
        steps=len(steps),
        total=float(predicted.sum() / measured.sum() - 1),
        typical=float(np.median(errors)),
        worst=float(np.quantile(errors, 0.9)),
    )


def _solve(
    gram: NDArray[np.float64], target: NDArray[np.float64], chosen: list[int]
) -> NDArray[np.float64] | None:
    """The unbounded solution in ``chosen`` features; ``None`` if one of them is negative."""
    solution = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen], rcond=None)[0]
    if (solution < 0).any():
        return None
    found = np.zeros(len(target))
    found[chosen] = solution
    return found


assert len(FEATURES) < 12, "trying all subsets would take long"
