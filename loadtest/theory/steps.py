# SPDX-License-Identifier: Apache-2.0
"""theta and gamma of the exact function, and the alpha that they ask for: Lemmas D.29 and D.31.

With full knowledge f_i depends on i alone, not on the set X of D.27, so that opt_i is the value of the k
highest scores among the first i tokens. S_i follow D.20: from S_{i-1} and the newest token the lowest goes.
Steps are the N tokens behind a prompt, at whose end S holds the best k: the induction may begin where it is
most at ease, for in the first tokens opt_i grows by a half and a third a step.

Where the paper can be read in two ways:

* D.28 states opt_i >= (1 - gamma) opt_{i-1}; the induction (D.29, D.30) uses opt_i >= (1 - gamma) opt_{i+1}.
  Both are measured; alpha is taken of the one that is used.
* D.25 is to hold for every S. ``theta`` is measured on the S_i of the run, ``theta_any`` on the worst single
  token. alpha is taken of the former, which asks for less.
* n of alpha = 10 n max(theta, gamma) is "the length": ``alpha`` counts the N steps of the induction,
  ``alpha_all`` all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loadtest.theory.functions import Function
from loadtest.theory.greedy import drop_lowest
from loadtest.theory.ranks import top

__all__ = ["GREEDY", "changes", "kept_exactly"]

GREEDY = 1 - 1 / math.e
SLACK = 10
"""theta = gamma = alpha / (10 n), in the proofs of D.31 and D.32."""


def changes(function: Function, totals: Tensor, seen: Tensor, k: int) -> dict[str, Tensor]:
    """Figures of each head, [KH].

    Args:
        totals: raw sums, [KH, N + 1, S]. seen: tokens at each of these steps.

    Returns:
        ``theta``, ``gamma``, ``gamma_stated``: the largest over steps; with ``_median`` the median.
        ``promised``: what the induction guarantees with them, as a share of opt's scores, h undone; of
        ``promised_by_step`` each step has its own theta and gamma. ``reached``: what S_i has of it at the
        end; ``reached_least``: at any step.
    """
    scores = function.scores(totals, seen)
    kept = kept_exactly(scores, seen, k)
    best = function.h(scores.topk(k, -1).values.sum(-1))
    now = function.h((scores * kept).sum(-1))
    later = function.h((scores[:, 1:] * kept[:, :-1]).sum(-1))
    theta = _fall(now[:, :-1], later)
    gamma, stated = _fall(best[:, 1:], best[:, :-1]), _fall(best[:, :-1], best[:, 1:])
    steps = theta.shape[1]
    worst = torch.maximum(theta.amax(1), gamma.amax(1))
    ends = best[:, -1]
    product = ((1 - theta) * (1 - gamma)).prod(1)
    uniform = ((1 - theta.amax(1)) * (1 - gamma.amax(1))) ** steps

    def share(value: Tensor) -> Tensor:
        return function.undone(GREEDY * value * ends) / function.undone(ends)

    share_now = function.undone(now) / function.undone(best)
    return {
        "theta": theta.amax(1), "theta_median": theta.median(1).values,
        "theta_any": _worst_token(function, scores, seen),
        "gamma": gamma.amax(1), "gamma_median": gamma.median(1).values,
        "gamma_stated": stated.amax(1),
        "alpha": SLACK * steps * worst, "alpha_all": SLACK * int(seen[-1]) * worst,
        "promised": share(uniform), "promised_by_step": share(product),
        "reached": share_now[:, -1], "reached_least": share_now.amin(1),
    }  # fmt: skip


def kept_exactly(scores: Tensor, seen: Tensor, k: int) -> Tensor:
    """S_i of D.20 at each step, [KH, N + 1, S]: first the best k, then one goes for each that comes."""
    kept = top(scores[:, 0, : int(seen[0])], k)
    kept = torch.nn.functional.pad(kept, (0, scores.shape[2] - kept.shape[1]))
    every = [kept]
    for step in range(1, len(seen)):
        newest = kept.clone()
        newest[:, int(seen[step]) - 1] = True
        kept = drop_lowest(scores[:, step], newest)
        every.append(kept)
    return torch.stack(every, 1)


def _fall(before: Tensor, after: Tensor) -> Tensor:
    """The smallest c >= 0 with after >= (1 - c) before."""
    return (1 - after / before).clamp(min=0)


def _worst_token(function: Function, scores: Tensor, seen: Tensor) -> Tensor:
    """How theta is on the worst set of one token, over all steps, [KH]."""
    falls = _fall(function.h(scores[:, :-1]), function.h(scores[:, 1:]))
    there = torch.arange(scores.shape[2]) < seen[:-1, None]
    # Of a token that never got anything nothing can fall: 0 / 0.
    return falls.nan_to_num(0).masked_fill(~there, 0).amax((1, 2))
