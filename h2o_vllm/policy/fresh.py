# SPDX-License-Identifier: Apache-2.0
"""The tokens that an eviction ranks for the first time, as :mod:`h2o_vllm.policy.formulas` see them.

Worker process; torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

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

    Tensors are [L, E, KH, n], float32, if nothing else is said.

    Attributes:
        scores: the attention collected so far.
        positions: of the tokens in the sequence, [E, 1, n].
        seen: queries so far, which is tokens computed so far, [E, 1, 1].
        late: how much of the scores the prompt's last queries and all behind them have given.
        measures: of keys and values, those that :attr:`.Policy.measures` names; see :data:`.MEASURES`.
    """

    scores: Tensor
    positions: Tensor
    seen: Tensor
    late: Tensor
    measures: Mapping[str, Tensor]


class Tokens:
    """Keys and values of m blocks in some layers, and the sums that :class:`Centre` makes of them.

    Args:
        read: gives keys and values, [L, m, KH, BS, D] each, float32. It is called once, if they are needed.
    """

    def __init__(self, read: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._read = read

    @cached_property
    def both(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [L, m, KH, BS, D] each, float32."""
        return self._read()

    @cached_property
    def lengths(self) -> Tensor:
        """Of keys, above 0: [L, m, KH, BS]."""
        return self.reduce(distances=True).clamp_min_(_SHORTEST)

    def reduce(
        self,
        given: Tensor | None = None,
        *,
        values: bool = False,
        distances: bool = False,
        over_tokens: bool = False,
    ) -> Tensor:
        """Sums over keys, or ``values``, x: of x * given, or their ``distances`` from what is given.

        In plain torch; a device may be faster.

        Args:
            given: [L, m, KH, BS] if ``over_tokens``, which distances are not, else [L, 1 or m, KH, D]. By
                default what leaves x as it is.

        Returns:
            One per token, [L, m, KH, BS], or if ``over_tokens`` one per number, [L, 1, KH, D].
        """
        terms = self.both[values]
        if given is not None:
            given = given[..., None] if over_tokens else given[..., None, :]
            terms = terms - given if distances else terms * given
        if distances:
            return torch.linalg.vector_norm(terms, dim=-1)
        return terms.sum((1, 3))[:, None] if over_tokens else terms.sum(-1)


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
        self._direction, self._value = data[..., :size], data[..., size:-1]
        self._distance = data[..., -1:]

    @classmethod
    def begin(cls, layers: int, heads: int, size: int, device: torch.device) -> Centre:
        """Of no tokens."""
        return cls(torch.zeros(layers, 1, heads, 2 * size + 1, device=device))

    def add(self, tokens: Tokens, measures: Collection[str]) -> None:
        """First pass: some blocks of tokens; of keys for ``similarity``, of values for ``deviation``."""
        if "similarity" in measures:
            self._direction += tokens.reduce(1 / tokens.lengths, over_tokens=True)
        if "deviation" in measures:
            self._value += tokens.reduce(values=True, over_tokens=True)

    def complete(self, count: int) -> None:
        """End of the first pass, which has added ``count`` tokens."""
        length = torch.linalg.vector_norm(self._direction, dim=-1, keepdim=True)
        self._direction /= length.clamp_min_(1e-12)
        self._value /= count

    def add_distances(self, distances: Tensor) -> None:
        """Second pass: the distances of all values, [L, m, KH, BS]."""
        self._distance += distances.mean((1, 3))[:, None, :, None]

    def similarity(self, tokens: Tokens) -> Tensor:
        """The cosine of keys and the direction: [L, m, KH, BS]."""
        return tokens.reduce(self._direction) / tokens.lengths

    def distances(self, tokens: Tokens) -> Tensor:
        """How far values lie from the mean value: [L, m, KH, BS]."""
        return tokens.reduce(self._value, values=True, distances=True)

    def deviation(self, distances: Tensor) -> Tensor:
        """``distances`` relative to their mean."""
        return distances / self._distance.clamp_min(_TINY)
