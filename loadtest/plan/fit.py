# SPDX-License-Identifier: Apache-2.0
"""Step times as a linear function of the work, fitted to steps that were measured. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.plan.work import FEATURES, Work

__all__ = ["Linear", "MeasuredStep", "Residual", "fit", "residual", "typical_steps"]


ROUNDS = 8
"""Of a fit, after which its weights have settled."""


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

    def slower(self, factor: float) -> Linear:
        """The same on a machine that takes ``factor`` times as long."""
        return Linear(factor * self.constant, tuple(factor * cost for cost in self.costs))


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


def typical_steps(rounds: Sequence[Sequence[MeasuredStep]]) -> list[MeasuredStep]:
    """Of rounds with the same steps the median time of each; all steps if they are not the same."""
    works = [[step.work for step in steps] for steps in rounds]
    if any(work != works[0] for work in works):
        return [step for steps in rounds for step in steps]
    return [
        MeasuredStep(same[0].work, statistics.median(step.seconds for step in same))
        for same in zip(*rounds, strict=True)
    ]


def fit(stock: Sequence[MeasuredStep], ours: Sequence[MeasuredStep]) -> tuple[Linear, Linear]:
    """Least squares of errors relative to the prediction, with no negative cost: vLLM's steps, and ours.

    Both run the same model, and rows without a budget on the same kernels: what no score has a part in costs
    both the same, but for a constant. Two fits would divide time between features that go together as it
    comes, one this way, the other that.

    Relative to what was *measured* would be simpler, and too low: whatever disturbs a step makes it longer,
    and long steps would count for little. So the weights come from the fit before, beginning with the
    measured ones. Features that no step has cost nothing.

    Raises:
        ValueError: there are no steps.
    """
    steps = [*stock, *ours]
    if not steps:
        raise ValueError("no steps to fit")
    measured = np.array([step.seconds for step in steps])
    counts = np.array(
        [(1, place >= len(stock), *step.work.values()) for place, step in enumerate(steps)],
        dtype=np.float64,
    )
    scale = np.maximum(counts.max(axis=0), 1)
    rows, weight = counts / scale, 1 / measured
    costs = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        costs = _bounded(rows * weight[:, None], measured * weight)
        weight = 1 / np.maximum(rows @ costs, 1e-9)
    constant, more, *others = (costs / scale).tolist()
    return Linear(constant, tuple(others)), Linear(constant + more, tuple(others))


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


def _bounded(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares.

    Of all subsets of the columns the one whose unbounded solution is nowhere negative and has the smallest
    error: the Karush-Kuhn-Tucker conditions make that the bounded solution, and with so few columns trying
    is quick.
    """
    gram, target, whole = rows.T @ rows, rows.T @ values, float(values @ values)
    present = np.flatnonzero(rows.any(axis=0)).tolist()
    best, least = np.zeros(len(target)), whole
    for size in range(1, len(present) + 1):
        for chosen in map(list, itertools.combinations(present, size)):
            solution = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen], rcond=None)[0]
            if (solution < 0).any():
                continue
            error = whole - float(solution @ target[chosen])
            # A column more has to be worth something beyond rounding.
            if error < least - 1e-9 * whole:
                best, least = np.zeros(len(target)), error
                best[chosen] = solution
    return best


assert len(FEATURES) < 11, "trying all subsets would take long"
