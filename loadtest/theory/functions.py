# SPDX-License-Identifier: Apache-2.0
"""What a step maximises: f_i(S) = h(sum of s in S of a_i(s)), line 10 of Algorithm 2.

a_i are accumulated attention scores; h is not decreasing, so that whatever h is, the best k tokens are those
with the highest scores, and one pass over them is exact: f_i is modular under a monotone h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "Function"]


class Function(NamedTuple):
    """What makes an f_i.

    Attributes:
        scores: a_i from raw sums, [KH, I, S], and how many tokens are seen at each step, [I].
        h: what is made of their sum. undone: its inverse.
    """

    scores: Callable[[Tensor, Tensor], Tensor]
    h: Callable[[Tensor], Tensor]
    undone: Callable[[Tensor], Tensor]


def _sums(totals: Tensor, seen: Tensor) -> Tensor:  # noqa: ARG001
    return totals


def _means(totals: Tensor, seen: Tensor) -> Tensor:
    """Over the queries that saw the token: as many as tokens are seen from it on."""
    queries = seen[:, None] - torch.arange(totals.shape[2])
    return totals / queries.clamp(min=1)


def _same(value: Tensor) -> Tensor:
    return value


FUNCTIONS = {
    "h2o": Function(_sums, _same, _same),
    "h2o-norm": Function(_means, _same, _same),
    "h2o, log(z + 1)": Function(_sums, torch.log1p, torch.expm1),
}
"""Algorithm 1's; the same with means over queries, as our policy has them; Remark D.14's example of an h."""
