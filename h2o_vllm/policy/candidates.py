# SPDX-License-Identifier: Apache-2.0
"""The tokens one eviction ranks, as :meth:`h2o_vllm.policy.base.Policy.eviction_scores` sees them. Worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Candidates"]

_AT_ONCE = 2**14
"""Keys or values that are looked at together, in float32: 4 MiB where a head has 64 elements."""


@dataclass(frozen=True)
class Candidates:
    """C tokens of one request, of which some will be evicted; the recent ones are not among them.

    ::

        | known: ranked before, in any order | fresh: never ranked, in the order of their positions |
        0                                  known                                                    C

    Attributes:
        scores: [L, KH, C], float32; finite. Protected first tokens have 0: they stay whatever is made
            of their scores.
        known: how many earlier evictions have ranked and moved.
        fresh_from: position of the first fresh token; the others follow one by one.
        seen: queries so far, which is tokens computed so far.
        keys: gives one layer's cached keys (rotated, where the model does so), a column each,
            [KH, D, C], in the model's dtype.
        values: gives one layer's cached values, block by block, [KH, C / BS, BS, D], a view or a copy.
        late: [L, KH, C], float32: how much of the scores the queries have given that the policy wants to know
            apart, :attr:`.Policy.late_prompt_queries` and all behind them; 0 for protected tokens, undefined
            for known ones. ``None`` if it does not, and inside of a prompt, whose end is still to come.
    """

    scores: Tensor
    known: int
    fresh_from: int
    seen: int
    keys: Callable[[int], Tensor]
    values: Callable[[int], Tensor]
    late: Tensor | None = None

    @property
    def fresh_positions(self) -> Tensor:
        """[C - known], float32."""
        count = self.scores.shape[-1] - self.known
        start, device = self.fresh_from, self.scores.device
        return torch.arange(start, start + count, dtype=torch.float32, device=device)

    @property
    def some_layers(self) -> Iterator[range]:
        """All layers in turn, as many together as fit: of a few tokens a call costs more than its work."""
        layers, heads, count = self.scores.shape
        at_once = max(1, _AT_ONCE // (heads * count))
        for start in range(0, layers, at_once):
            yield range(start, min(start + at_once, layers))

    def keys_of(self, layers: range) -> Tensor:
        """[l, KH, D, C], float32."""
        return torch.stack([self.keys(layer) for layer in layers]).float()

    def values_of(self, layers: range) -> Tensor:
        """[l, KH, C, D], float32."""
        return torch.stack([self.values(layer) for layer in layers]).float().flatten(2, 3)

    def with_fresh(self, fresh: Tensor) -> Tensor:
        """The scores, with those of the fresh tokens, [L, KH, C - known], replaced."""
        return torch.cat([self.scores[..., : self.known], fresh], dim=-1)
