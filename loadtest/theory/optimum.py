# SPDX-License-Identifier: Apache-2.0
"""What greedy steps reach of the optimum, on instances small enough to try every set."""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.theory.greedy import SetFunction, best, evict, greedy, subsets
from loadtest.theory.ranks import top

__all__ = ["WAYS", "reached"]

WAYS = ("top-k", "evict", "greedy", "random")
"""The highest probabilities, as H2O keeps them; D.12 and Algorithm 3 on the function itself; any set."""


def reached(
    value: SetFunction, prob: Tensor, k: int, generator: torch.Generator
) -> dict[str, float]:
    """What each way to keep k of n tokens reaches, as a share of the best of all sets of k.

    ``prob``: [G, n], the attention that top-k goes by.
    """
    n = prob.shape[1]
    anyone = torch.zeros(n, dtype=torch.bool)
    anyone[torch.randperm(n, generator=generator)[:k]] = True
    every = subsets(n, k)
    sets = [top(prob.sum(0), k), evict(value, n, k), greedy(value, n, k), anyone]
    values = value(torch.stack([*sets, best(value, every)]))
    return dict(zip(WAYS, (values[:-1] / values[-1]).tolist(), strict=True))
