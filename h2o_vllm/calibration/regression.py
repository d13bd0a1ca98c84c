# SPDX-License-Identifier: Apache-2.0
"""A ridge regression per layer and KV head, to the logarithm of attention, from sums over tokens.

Independent of models: :mod:`.features` makes the features.
"""

import torch
from torch import Tensor

PENALTY = 10.0
"""Penalty on the squares of the weights, for features of variance 1 and thousands of tokens."""

TINY = 1e-7
"""Below the attention of nearly any token, per query."""


class Sums:
    """Sums over the tokens of one layer, float64.

    Attributes:
        tokens: number of tokens.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._products: Tensor | None = None
        self._targets: Tensor | None = None

    def add(self, known: Tensor, wanted: Tensor) -> None:
        """Add T tokens.

        Args:
            known: features, [KH, T, F], or [1, T, F] if all heads have the same.
            wanted: the attention to predict, [KH, T].
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
        """The weights of the features, then the constant: [KH, F + 1], float32, on the host.

        Raises:
            ValueError: no tokens were added.
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
        # Symmetric and, with the penalty, positive definite in spite of rounding.
        root = torch.linalg.cholesky(scaled + PENALTY * torch.eye(mean.shape[-1]).double())
        weights = torch.cholesky_solve(wanted[..., None], root)[..., 0] / spread
        level = level - (weights * mean).sum(-1)
        return torch.cat([weights, level[..., None]], -1).float()
