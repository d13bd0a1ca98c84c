# SPDX-License-Identifier: Apache-2.0
"""Scores so far against the attention that comes: section 4.1's claim that local statistics do as well.

Full attention on both sides, so that nothing but time lies between them. Ranked are the prompt's T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.theory.ranks import overlap, rank_correlation, top

__all__ = ["HORIZONS", "RANKERS", "foretold", "rankers"]

HORIZONS = (64, 256, 512)
"""Tokens ahead."""

RANKERS = ("h2o", "h2o-norm", "recency", "random")
"""Sums so far, means over queries, and two controls that know no attention."""


def rankers(past: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Scores of the prompt's tokens, [KH, T], by name; ``past``: sums so far."""
    tokens = torch.arange(past.shape[1])
    every = (past, past / (len(tokens) - tokens), tokens.expand_as(past).double(),
             torch.rand(past.shape, generator=generator))  # fmt: skip
    return dict(zip(RANKERS, every, strict=True))


def foretold(scores: Tensor, coming: Tensor, k: int) -> dict[str, Tensor]:
    """Figures of each head, [KH], of scores against the attention that comes, [KH, T] each.

    Returns:
        ``ranks``: rank correlation; ``same``: share of the k tokens that get most whom the scores put among
        their best k; ``caught``: what these get, over what the k that get most get.
    """
    mine, best = top(scores, k), top(coming, k)
    return {
        "ranks": rank_correlation(scores, coming),
        "same": overlap(mine, best),
        "caught": (coming * mine).sum(-1) / (coming * best).sum(-1),
    }
