# SPDX-License-Identifier: Apache-2.0
"""How often a set function fails diminishing returns (D.1, D.4) and monotony (D.2), on sets drawn at random.

Drawn are nested A in B and a token x outside of B; B has 2 to n - 1 tokens, A 1 to all but one of these, all
sizes alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from loadtest.theory.greedy import SetFunction

__all__ = ["Triples", "draw", "failures"]

TOLERANCE = 1e-9
"""In units of the function over everything: far above float64's rounding of it."""

LARGE = 0.01
"""In the same units."""


class Triples(NamedTuple):
    """Nested sets, [M, n] each, without and with the further token."""

    smaller: Tensor
    larger: Tensor
    smaller_and: Tensor
    larger_and: Tensor


def draw(n: int, count: int, generator: torch.Generator) -> Triples:
    """``count`` triples of n >= 3 tokens."""
    places = torch.rand(count, n, generator=generator).argsort(-1)
    size = torch.randint(2, n, (count, 1), generator=generator)
    part = 1 + (torch.rand(count, 1, generator=generator) * (size - 1)).long()
    smaller, larger, further = places < part, places < size, places == size
    return Triples(smaller, larger, smaller | further, larger | further)


def failures(value: SetFunction, triples: Triples) -> dict[str, float]:
    """Shares of the triples.

    Returns:
        ``returns``: x is worth more to the larger set than to the smaller; ``returns_large``: by more than
        1 % of everything; ``monotony``: x makes the smaller set worth less; ``monotony_large``: by so much.
    """
    small, large, small_and, large_and = (value(masks) for masks in triples)
    excess = (large_and - large) - (small_and - small)
    loss = small - small_and
    return {
        "returns": _share(excess > TOLERANCE), "returns_large": _share(excess > LARGE),
        "monotony": _share(loss > TOLERANCE), "monotony_large": _share(loss > LARGE),
    }  # fmt: skip


def _share(which: Tensor) -> float:
    return float(which.double().mean())
