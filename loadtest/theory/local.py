# SPDX-License-Identifier: Apache-2.0
"""eps: scores in the cut cache (f with a tilde) against those of full attention, along a real eviction.

Lemma D.30 wants f(X) >= f~(X) - eps for all X, and Theorem D.32 eps = beta / (10 n). X are here all subsets
of what is kept: of others the cut cache knows nothing any more. So eps is the sum of what the kept tokens'
scores are too high by. n counts the steps of the induction, as in ``steps``. What the model computes
differs, too, once tokens are gone: queries are those of the run, as a server's would be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.theory.ranks import overlap, rank_correlation, top
from loadtest.theory.steps import SLACK
from loadtest.theory.watched import Eviction

__all__ = ["errors"]


def errors(run: Eviction, layer: int, totals: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """Figures of each head, [KH].

    Args:
        totals: scores of full attention, [KH, N + 1, S]. seen: tokens at each of these steps.

    Returns:
        ``eps``, ``beta``: at the end, in units of opt. ``inflation``: the kept tokens' scores over what full
        attention gave them. ``ranks``: correlation of the two. Over steps: ``same_best``, share of the best
        k tokens that are kept; ``same_heavy``, share of the heavy tokens that the same rule would keep had
        it the true scores; ``reached``, what is kept of opt (with ``_least`` the least); ``worse``, share of
        steps after which the new S is worth less than the old one is by then, where the induction's first
        inequality fails.
    """
    kept = run.kept[:, layer].movedim(0, 1)
    worth = (totals * kept).sum(-1)
    best = totals.topk(run.plan.budget, -1).values.sum(-1)
    unchanged = (totals[:, 1:] * kept[:, :-1]).sum(-1)
    mine, true, last = run.scores[layer].double(), totals[:, -1], kept[:, -1]
    eps = ((mine - true).clamp(min=0) * last).sum(-1) / best[:, -1]
    older = torch.arange(totals.shape[2]) < (seen - run.plan.recent)[:, None]
    heavy = top(totals.masked_fill(~older, -1), run.plan.budget - run.plan.recent)
    heads = range(len(kept))
    return {
        "eps": eps,
        "beta": SLACK * (len(seen) - 1) * eps,
        "inflation": (mine * last).sum(-1) / (true * last).sum(-1),
        "ranks": torch.stack([rank_correlation(mine[h, last[h]], true[h, last[h]]) for h in heads]),
        "same_best": overlap(kept, top(totals, run.plan.budget)).mean(-1),
        "same_heavy": overlap(kept, heavy).mean(-1),
        "reached": (worth / best)[:, -1],
        "reached_least": (worth / best).amin(-1),
        "worse": (worth[:, 1:] < unchanged).double().mean(-1),
    }
