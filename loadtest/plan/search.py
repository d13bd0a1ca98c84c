# SPDX-License-Identifier: Apache-2.0
"""How many replicas a rate needs, and which rate so many replicas carry: searches over simulations. Pure.

A rate is carried if a percentile of the first token stays below its objective, and as much is generated as is
asked for. Both searches assume that more replicas, or less traffic, do not make the first token later; of one
seed's traffic that holds but for noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.plan.figures import Figures

__all__ = ["Found", "Objective", "carried_rate", "needed_replicas"]

ACCURACY = 0.04
"""Relative, of a rate that is found."""

KEEPS_UP = 0.9
"""Tokens that are generated over those that are asked for meanwhile. Below it requests pile up among the
running ones, where their first token does not show it. Not 1: which of them end within a simulation is
chance."""

Simulate = Callable[[float, int], Figures]
"""Figures at a rate, requests per second of all, on so many replicas."""


@dataclass(frozen=True)
class Objective:
    """The first token comes within ``seconds`` in ``percent`` % of the requests: 50, 90 or 99."""

    seconds: float
    percent: int

    def met(self, figures: Figures) -> bool:
        """Whether it does, and the engine does not fall behind."""
        keeps_up = figures.tok_per_s >= KEEPS_UP * figures.asked_tok_per_s
        return keeps_up and figures.first_token_s[f"p{self.percent}"] <= self.seconds


@dataclass(frozen=True)
class Found:
    """A fleet and the traffic that it carries."""

    replicas: int
    rate: float
    figures: Figures


def carried_rate(
    simulate: Simulate, objective: Objective, replicas: int, guess: float
) -> Found | None:
    """The highest rate, to :data:`ACCURACY`, from ``guess`` on; ``None``: none meets the objective.

    The lowest one that is tried, a thousandth of ``guess``, finds an engine that is alone with each request.
    """
    best = None
    low, high = guess / 1000, math.inf
    rate = guess
    while high > low * (1 + ACCURACY):
        figures = simulate(rate, replicas)
        if objective.met(figures):
            best, low = Found(replicas, rate, figures), rate
        else:
            high = rate
        if best is None and rate <= guess / 1000:
            return None
        if math.isinf(high):
            rate = 2 * low
        elif best is None:
            rate = max(guess / 1000, rate / 4)
        else:
            rate = math.sqrt(low * high)
    return best


def needed_replicas(
    simulate: Simulate, objective: Objective, rate: float, guess: int, most: int = 100_000
) -> Found | None:
    """The smallest fleet that carries ``rate``, from ``guess`` on; ``None``: not even ``most`` do."""
    best = None
    low, high = 0, most + 1
    replicas = guess
    while high - low > 1:
        figures = simulate(rate, replicas)
        if objective.met(figures):
            best, high = Found(replicas, rate, figures), replicas
        else:
            low = replicas
        if best is None:
            replicas = min(most, 2 * replicas)
        elif low == 0:
            replicas = max(1, high // 2)
        else:
            replicas = (low + high) // 2
    return best
