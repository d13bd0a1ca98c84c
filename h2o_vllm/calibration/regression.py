# SPDX-License-Identifier: Apache-2.0
"""A ridge regression per layer and KV head, to the logarithm of attention, from sums over tokens.

Knows nothing of models: :mod:`.features` says of which features.
"""

from __future__ import annotations

import torch
from torch import Tensor

PENALTY = 10.0
"""Of the squares of the weights, where features have a variance of 1 and there are thousands of tokens."""

TINY = 1e-7
"""Below the attention of nearly any token, per query."""


class Sums:
    """What tokens add up to in one layer, float64.

    Attributes:
        tokens: how many there were.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._products: Tensor | None = None
        self._targets: Tensor | None = None

    def add(self, known: Tensor, wanted: Tensor) -> None:
        """Tokens.

        Args:
            known: features, [KH, T, F], or [1, T, F] where heads have the same.
            wanted: attention that is to be predicted, [KH, T].
        """
        wide = torch.cat([known, torch.ones_like(known[..., :1])], -1).double()
        logs = wanted.clamp_min(TINY).log().double()
        products = wide.mT @ wide
        targets = (logs[:, None] @ wide)[:, 0]
        if self._products is None or self._targets is None:
            self._products, self._targets = products, targets
        else:
            self._products += products
            self._targets += targets
        self.tokens += known.shape[1]

    def solve(self) -> Tensor:
        """Weights of the features, and of one, as they are: [KH, F + 1], float32, on the host.

        Raises:
            ValueError: there are no tokens.
        """
        if self._products is None or self._targets is None:
            raise ValueError("nothing to learn from: no token was added")
        # On the host: a device may lack the memory, or a solver.
        products, targets = self._products.cpu(), self._targets.cpu()
        count = products[..., -1, -1]
        mean = products[..., -1, :-1] / count[..., None]
        squares = products.diagonal(dim1=-2, dim2=-1)[..., :-1] / count[..., None]
        spread = (squares - mean.square()).clamp_min(1e-12).sqrt()
        centred = (
            products[..., :-1, :-1] - count[..., None, None] * mean[..., None] * mean[..., None, :]
        )
        scaled = centred / spread[..., None] / spread[..., None, :]
        level = targets[..., -1] / count
        wanted = (targets[..., :-1] - mean * targets[..., -1:]) / spread
        # Symmetric and positive: what is left to rounding, the penalty covers.
        root = torch.linalg.cholesky(scaled + PENALTY * torch.eye(mean.shape[-1]).double())
        weights = torch.cholesky_solve(wanted[..., None], root)[..., 0] / spread
        level = level - (weights * mean).sum(-1)
        return torch.cat([weights, level[..., None]], -1).float()


def predicted(weights: Tensor, known: Tensor) -> Tensor:
    """The attention that is expected, [KH, T], float32; above 0, at most 1.

    Args:
        weights: as :meth:`Sums.solve` has found them. known: as for :meth:`Sums.add`.
    """
    logs = (known @ weights[:, :-1, None])[..., 0] + weights[:, -1:]
    # A token unlike all that was learned from may be expected to get anything.
    return logs.clamp(-50.0, 0.0).exp()
