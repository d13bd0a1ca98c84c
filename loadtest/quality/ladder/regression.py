# SPDX-License-Identifier: Apache-2.0
"""What is learned of attention: a ridge regression per layer and KV head, to a logarithm.

Knows sums over tokens and nothing of models: :mod:`.gate` and :mod:`.zap` say of which features, and to what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TINY", "Regression", "solve"]

PENALTY = 10.0
"""Of the squares of the weights, where features have a variance of 1 and there are thousands of tokens."""

TINY = 1e-7
"""Below the attention of nearly any token, per query."""


@dataclass(frozen=True)
class Regression:
    """Weights.

    Attributes:
        weights: [L, KH, F + 1], of the features and of one. mean, spread: of the features, [L, KH, F], or
            [L, 1, F] where heads have the same.
    """

    weights: Tensor
    mean: Tensor
    spread: Tensor

    def scores(self, layer: int, given: Tensor) -> Tensor:
        """What is expected, [KH, n], from features, [KH, n, F] or [1, n, F]."""
        scaled = (given - self.mean[layer][:, None]) / self.spread[layer][:, None]
        weights = self.weights[layer]
        logs = (scaled @ weights[:, :-1, None])[..., 0] + weights[:, -1:]
        return logs.exp()


def solve(products: Tensor, targets: Tensor) -> Regression:
    """From sums over tokens: products of features, [L, KH, F + 1, F + 1], and with targets, [L, KH, F + 1].

    Where the heads of a layer have the same features, KH of the former is 1.
    """
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
    penalty = PENALTY * torch.eye(mean.shape[-1], dtype=mean.dtype)
    weights = torch.linalg.solve(scaled + penalty, wanted[..., None])[..., 0]
    both = torch.cat([weights, level[..., None]], -1)
    return Regression(both.float(), mean.float(), spread.float())
