# SPDX-License-Identifier: Apache-2.0
"""The tokens that an eviction ranks for the first time, as :mod:`h2o_vllm.policy.formulas` see them.

Worker process; torch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SHORTEST = 1e-10
"""A key of no length has no direction."""
_TINY = 1e-20
"""Below any distance between two values."""


def head_number(layer: int, head: int) -> int:
    """What tells a KV head of the model from all others, in whichever process it is."""
    return (layer << 16) + head


@dataclass(frozen=True)
class Fresh:
    """n tokens each of E evictions, in L layers and KH heads; they follow each other in the text.

    Tensors are [L, E, KH, n], float32, if nothing else is said. A policy's formulas find what
    :attr:`.Policy.measures` names.

    Attributes:
        scores: the attention collected so far.
        positions: of the tokens in the sequence, [E, 1, n].
        seen: queries so far, which is tokens computed so far, [E, 1, 1].
        late: how much of the scores the prompt's last queries and all behind them have given.
        similarity: the cosine of each token's key and the centre's direction.
        deviation: how far each token's value lies from the centre's, relative to the centre's mean distance.
        predicted: the attention that each token is expected to get, above 0.
    """

    scores: Tensor
    positions: Tensor
    seen: Tensor
    late: Tensor | None = None
    similarity: Tensor | None = None
    deviation: Tensor | None = None
    predicted: Tensor | None = None


class Centre:
    """What tokens' keys and values are compared with: the middle of those that a first eviction ranks.

    Later evictions of the request compare with the same centre, so that scores of all of them compare. It is
    taken per layer and KV head, in two passes over the tokens: :meth:`add`, then :meth:`add_distances`.

    Args:
        data: [L, M, KH, 2 * D + 1], float32: the mean key's direction, the mean value, and the mean distance
            of values from it. M is 1, or the number of blocks to compare, each with a centre of its own.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        size = data.shape[-1] // 2
        self._direction, self._value = data[..., None, :size], data[..., None, size:-1]
        self._distance = data[..., -1:]

    @classmethod
    def begin(cls, layers: int, heads: int, size: int, device: torch.device) -> Centre:
        """Of no tokens."""
        return cls(torch.zeros(layers, 1, heads, 2 * size + 1, device=device))

    def add(self, keys: Tensor | None, values: Tensor | None) -> None:
        """First pass: some blocks of tokens, [L, m, KH, BS, D] each; ``None`` where nothing compares them."""
        # Blocks first, then a block's tokens, which is three times as fast on CPUs.
        if keys is not None:
            directions = keys.mT / _lengths(keys)[..., None, :]
            self._direction += directions.sum(1, True).sum(4, True).mT
        if values is not None:
            self._value += values.sum(1, True).sum(3, True)

    def complete(self, count: int) -> None:
        """End of the first pass, which has added ``count`` tokens."""
        length = torch.linalg.vector_norm(self._direction, dim=-1, keepdim=True)
        self._direction /= length.clamp_min_(1e-12)
        self._value /= count

    def add_distances(self, distances: Tensor) -> None:
        """Second pass: the distances of all values, [L, m, KH, BS]."""
        self._distance += distances.mean((1, 3))[:, None, :, None]

    def similarity(self, keys: Tensor) -> Tensor:
        """The cosine of keys, [L, m, KH, BS, D], and the direction: [L, m, KH, BS]."""
        return (self._direction @ keys.mT).squeeze(3) / _lengths(keys)

    def distances(self, values: Tensor) -> Tensor:
        """How far values, [L, m, KH, BS, D], lie from the mean value: [L, m, KH, BS]."""
        return torch.linalg.vector_norm(values - self._value, dim=-1)

    def deviation(self, distances: Tensor) -> Tensor:
        """``distances`` relative to their mean."""
        return distances / self._distance.clamp_min(_TINY)


def _lengths(keys: Tensor) -> Tensor:
    # On CPUs the tokens of a block lie side by side, and vector_norm takes ten times as long.
    return keys.mT.square().sum(-2).sqrt_().clamp_min_(_SHORTEST)
