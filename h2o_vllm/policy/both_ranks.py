# SPDX-License-Identifier: Apache-2.0
"""Attention and KeyDiff by the better rank: what a text goes on from, and what it may yet be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from h2o_vllm.policy.caote import CAOTEPolicy
from h2o_vllm.policy.keydiff import KeyDiffPolicy
from h2o_vllm.policy.snapkv import SnapKVPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["CAOTEKeyDiffPolicy", "SnapKVKeyDiffPolicy"]

_KEYDIFF = KeyDiffPolicy()


class CAOTEKeyDiffPolicy(CAOTEPolicy):
    """Keep the tokens that attention's output would miss most, and those with the most distinctive keys.

    Attention so far (CAOTE, https://arxiv.org/abs/2504.14051) knows what a text goes on from, and nothing
    of what will be asked; distinctive keys (KeyDiff, https://arxiv.org/abs/2504.15364) are the other way
    round. Each gets half of the slots: tokens are taken in the order of the better of their two ranks.

    Ranks of different evictions cannot be compared. So a token's score, when it is ranked for the first
    time, is the larger of its own by ``caote`` and of that, by ``caote``, of the newcomer that has its rank
    by ``keydiff``. That gives the same order, and is a sum of attention to which later queries add.
    """

    name: ClassVar[str] = "caote-keydiff"

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """Raise the fresh tokens with distinctive keys."""
        return _raised(super().eviction_scores(candidates), candidates)


class SnapKVKeyDiffPolicy(SnapKVPolicy):
    """Keep what the prompt's end looks at, and the tokens with the most distinctive keys.

    As :class:`CAOTEKeyDiffPolicy`, with SnapKV (https://arxiv.org/abs/2404.14469) in CAOTE's place: one half
    of the slots knows a question at the prompt's end, and one that comes later may find its answer in the
    other.
    """

    name: ClassVar[str] = "snapkv-keydiff"

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """Raise the fresh tokens with distinctive keys."""
        pooled = super().eviction_scores(candidates)
        return None if pooled is None else _raised(pooled, candidates)


def _raised(scores: Tensor, candidates: Candidates) -> Tensor:
    known = candidates.known
    if scores.shape[-1] == known:
        return scores
    fresh = scores[..., known:]
    distinct = _KEYDIFF.eviction_scores(candidates)[..., known:]
    values = fresh.sort(dim=-1, descending=True).values
    order = distinct.sort(dim=-1, descending=True, stable=True).indices
    return candidates.with_fresh(
        torch.maximum(fresh, torch.empty_like(fresh).scatter_(-1, order, values))
    )
