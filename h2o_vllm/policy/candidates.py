# SPDX-License-Identifier: Apache-2.0
"""The tokens that one eviction ranks, as :mod:`h2o_vllm.policy.formulas` see them. Worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Candidates", "head_number"]


def head_number(layer: int, head: int) -> int:
    """What tells a KV head of the model from all others, in whichever process it is."""
    return (layer << 16) + head


@dataclass(frozen=True)
class Candidates:
    """C tokens of one request, of which some will be evicted; the recent ones are not among them.

    ::

        | known: ranked before, in any order | fresh: never ranked, in the order of their positions |
        0                                  known                                                    C

    Attributes:
        scores: [L, KH, C], float32; finite.
        known: how many earlier evictions have ranked and moved.
        fresh_from: position of the first fresh token; the others follow one by one.
        seen: queries so far, which is tokens computed so far.
        key_similarity: computes the cosine of each token's key (rotated, if the model rotates) and the mean
            of all candidates' keys, each of length 1; [L, KH, C], float32.
        value_distances: computes how far each token's value lies from the mean of all candidates'; the same.
        late: [L, KH, C], float32: how much of the scores the prompt's last queries and all behind them have
            given; undefined for known ones. ``None`` if no rank wants it.
        counts: [L, KH, 1]: how many candidates each head has, where heads share slots. Those with fewer begin
            with padding, of which everything is 0. ``None``: each has all C.
        predicted: computes the attention that each fresh token is expected to get, [L, KH, C - known],
            float32, above 0. ``None`` in an engine without a calibration.
        first_head: :func:`head_number` of the first head of the first of these layers: workers that hold
            parts of a model draw as one that holds all of it.
        merge: a faster :func:`.merge_ranks`, which gives the same.
    """

    scores: Tensor
    known: int
    fresh_from: int
    seen: int
    key_similarity: Callable[[], Tensor]
    value_distances: Callable[[], Tensor]
    late: Tensor | None = None
    counts: Tensor | None = None
    predicted: Callable[[], Tensor] | None = None
    first_head: int = 0
    merge: Callable[..., Tensor] | None = None

    @property
    def fresh_positions(self) -> Tensor:
        """[C - known], float32."""
        count = self.scores.shape[-1] - self.known
        start, device = self.fresh_from, self.scores.device
        return torch.arange(start, start + count, dtype=torch.float32, device=device)

    def with_fresh(self, fresh: Tensor) -> Tensor:
        """The scores, with those of the fresh tokens, [L, KH, C - known], replaced."""
        return torch.cat([self.scores[..., : self.known], fresh], dim=-1)

    def mean(self, values: Tensor) -> Tensor:
        """Over each head's candidates: [L, KH, C], where padding has 0, to [L, KH, 1]."""
        count = values.shape[2] if self.counts is None else self.counts
        return values.sum(2, keepdim=True) / count
