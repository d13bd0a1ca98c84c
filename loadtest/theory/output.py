# SPDX-License-Identifier: Apache-2.0
"""A set function that matters: how near a query's attention output comes to what it is with all keys.

g(S) = (||o|| - ||o - o_S||) / ||o||, where o_S is the output with the softmax taken over S alone, as after an
eviction, and || || runs over the G query heads that share the KV head. g of all keys is 1, of none 0 (D.8
wants f of nothing to be 0), and of keys that are worse than none it is negative. float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.theory.greedy import SetFunction

__all__ = ["output_kept", "score_sum"]


def output_kept(prob: Tensor, values: Tensor) -> SetFunction:
    """g, of attention probabilities [G, n] to keys whose values are [n, D]; they need not add up to 1."""
    prob, values = prob.double(), values.double()
    full = (prob / prob.sum(-1, keepdim=True)) @ values
    length = full.norm()

    def value(masks: Tensor) -> Tensor:
        weights = prob[:, None] * masks
        # Of no keys there is no output.
        total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        mixed = (weights / total) @ values
        return 1 - (mixed - full[:, None]).norm(dim=(0, 2)) / length

    return value


def score_sum(prob: Tensor) -> SetFunction:
    """What H2O maximises in place of it, as a share of all: the attention that S gets. Modular."""
    scores = prob.double().sum(0)

    def value(masks: Tensor) -> Tensor:
        return masks.double() @ scores / scores.sum()

    return value
