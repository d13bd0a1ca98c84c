# SPDX-License-Identifier: Apache-2.0
"""The paper's greedy steps on any set function, and its optimum by brute force. Pure.

A set of n tokens is a boolean mask, [n]; a set function takes M of them, [M, n], and returns M values.
Of equally good tokens the first is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

__all__ = ["SetFunction", "best", "drop_lowest", "evict", "evict_one", "greedy", "subsets"]

SetFunction = Callable[[Tensor], Tensor]


def subsets(n: int, k: int) -> Tensor:
    """All sets of k of n tokens, [M, n]."""
    chosen = torch.tensor(list(combinations(range(n), k)))
    return torch.zeros(len(chosen), n, dtype=torch.bool).scatter_(1, chosen, True)


def best(value: SetFunction, candidates: Tensor) -> Tensor:
    """The best of [M, n] sets, [n]."""
    return candidates[int(value(candidates).argmax())]


def greedy(value: SetFunction, n: int, k: int) -> Tensor:
    """Algorithm 3: from nothing, k times the token with which the set is worth most."""
    chosen = torch.zeros(n, dtype=torch.bool)
    for _ in range(k):
        chosen = best(value, _changed(chosen, ~chosen))
    return chosen


def evict_one(value: SetFunction, kept: Tensor) -> Tensor:
    """Definition D.12: without the token without which the set is worth most."""
    return best(value, _changed(kept, kept))


def evict(value: SetFunction, n: int, k: int) -> Tensor:
    """From all n tokens to k, one at a time."""
    kept = torch.ones(n, dtype=torch.bool)
    for _ in range(n - k):
        kept = evict_one(value, kept)
    return kept


def drop_lowest(scores: Tensor, kept: Tensor) -> Tensor:
    """D.12 where a set is worth the sum of its scores: the lowest goes. [..., S] each, and returned."""
    lowest = scores.masked_fill(~kept, torch.inf).argmin(-1, keepdim=True)
    return kept.scatter(-1, lowest, False)


def _changed(mask: Tensor, where: Tensor) -> Tensor:
    """``mask`` with one of the tokens of ``where`` added or taken away, each in its row."""
    places = where.nonzero()
    return mask.repeat(len(places), 1).scatter_(1, places, ~mask[places])
