# SPDX-License-Identifier: Apache-2.0
"""How alike two rankings of the same tokens are. Pure; [..., S] each, a figure for each row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["overlap", "rank_correlation", "top"]


def top(scores: Tensor, k: int) -> Tensor:
    """The k highest, a mask."""
    chosen = scores.topk(k, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def overlap(mine: Tensor, other: Tensor) -> Tensor:
    """Share of the tokens in ``other`` that are in ``mine``, too; masks."""
    return (mine & other).sum(-1) / other.sum(-1)


def rank_correlation(mine: Tensor, other: Tensor) -> Tensor:
    """Spearman's: 1 is the same order, -1 the opposite. Of equal scores the first ranks lower."""
    x, y = (_centred(one) for one in (mine, other))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def _centred(scores: Tensor) -> Tensor:
    """Ranks about their mean."""
    places = scores.argsort(dim=-1, stable=True).argsort(-1).double()
    return places - places.mean(-1, keepdim=True)
