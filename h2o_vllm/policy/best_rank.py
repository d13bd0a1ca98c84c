# SPDX-License-Identifier: Apache-2.0
"""Policies that rank in several ways: each has its share of the slots, and a token counts by its best rank.

Attention so far knows what a text goes on from; the attention of the prompt's end knows what was asked there;
a distinctive key may be what is asked later. None of them knows what the others know.

Ranks of different evictions cannot be compared. So when a token is ranked for the first time, its score
becomes the largest of its own, by the first way, and of the scores, by the first way, of the newcomers that
have its ranks in the others. That gives the same order, and is a sum of attention to which later queries add.

Two tokens that have one rank in different ways would so have one score. Between
those that stay and those that go many borders would cut such a pair, and where the two happen to lie would
decide. So the score of another way's rank is less by :data:`BEHIND` of its size, that of a third way's by
twice as much: at one rank the first way's token comes first, then the second way's, in the order of the
policy's name. Whoever ranks knows that, and nobody who compares scores later has to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from h2o_vllm.policy.caote import CAOTEPolicy
from h2o_vllm.policy.keydiff import KeyDiffPolicy
from h2o_vllm.policy.snapkv import WINDOW, SnapKVPolicy, pooled
from h2o_vllm.policy.zap import ZapPolicy, foretold

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = [
    "CAOTEKeyDiffPolicy",
    "CAOTESnapKVKeyDiffPolicy",
    "SnapKVKeyDiffPolicy",
    "ZapCAOTESnapKVKeyDiffPolicy",
    "ZapKeyDiffPolicy",
    "ZapSnapKVKeyDiffPolicy",
]

_KEYDIFF = KeyDiffPolicy()

BEHIND = 2.0**-20
"""Eight times what float32 can tell apart: sums stay apart as well, while nothing but rounding is added. A
quarter of what parts neighbours that SnapKV pools, so that this makes no new ties among them."""


class CAOTEKeyDiffPolicy(CAOTEPolicy):
    """Keep the tokens that attention's output would miss most, and those with the most distinctive keys.

    CAOTE (https://arxiv.org/abs/2504.14051) and KeyDiff (https://arxiv.org/abs/2504.15364).
    """

    name: ClassVar[str] = "caote-keydiff"

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """Raise the fresh tokens with distinctive keys."""
        scores = super().eviction_scores(candidates)
        if scores.shape[-1] == candidates.known:
            return scores
        return _raised(scores, candidates, _distinctions(candidates))


class SnapKVKeyDiffPolicy(SnapKVPolicy):
    """Keep what the prompt's end looks at, and the tokens with the most distinctive keys.

    SnapKV (https://arxiv.org/abs/2404.14469) and KeyDiff: one half of the slots knows a question at the
    prompt's end, and one that comes later may find its answer in the other.
    """

    name: ClassVar[str] = "snapkv-keydiff"

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """Raise the fresh tokens with distinctive keys."""
        scores = super().eviction_scores(candidates)
        return None if scores is None else _raised(scores, candidates, _distinctions(candidates))


class CAOTESnapKVKeyDiffPolicy(CAOTEPolicy):
    """Keep what attention's output would miss most, what the prompt's end looks at, and distinctive keys.

    CAOTE (https://arxiv.org/abs/2504.14051), SnapKV (https://arxiv.org/abs/2404.14469) and KeyDiff
    (https://arxiv.org/abs/2504.15364). For SnapKV's rank the attention of the prompt's last queries, and of
    all behind them, is known apart. Inside of a bounded prompt, whose end is still to come, the others rank
    alone.
    """

    name: ClassVar[str] = "caote-snapkv-keydiff"
    late_prompt_queries: ClassVar[int | None] = WINDOW

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """Raise the fresh tokens with distinctive keys, and those that late queries look at."""
        scores = super().eviction_scores(candidates)
        if scores.shape[-1] == candidates.known:
            return scores
        return _raised(scores, candidates, *_looks(candidates), _distinctions(candidates))


class ZapKeyDiffPolicy(ZapPolicy):
    """Keep what a calibration predicts, and the tokens with the most distinctive keys.

    KVzap (https://arxiv.org/abs/2601.07891) and KeyDiff (https://arxiv.org/abs/2504.15364).
    """

    name: ClassVar[str] = "zap-keydiff"

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """Raise the fresh tokens with distinctive keys."""
        scores = super().eviction_scores(candidates)
        return None if scores is None else _raised(scores, candidates, _distinctions(candidates))


class ZapSnapKVKeyDiffPolicy(SnapKVPolicy):
    """Keep what a calibration predicts, what the prompt's end looks at, and distinctive keys.

    KVzap (https://arxiv.org/abs/2601.07891), SnapKV (https://arxiv.org/abs/2404.14469) and KeyDiff
    (https://arxiv.org/abs/2504.15364). Until a token is ranked its score is what late queries give it, as
    SnapKV's; then it is in the units of what is foretold, which are more alike from head to head, and later
    queries add to it. Inside of a bounded prompt, whose end is still to come, the others rank alone.
    """

    name: ClassVar[str] = "zap-snapkv-keydiff"

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """What is foretold of fresh tokens, raised where late queries look and keys are distinctive."""
        late = super().eviction_scores(candidates)
        if late is None:
            return None
        scores = candidates.with_fresh(foretold(candidates))
        looks = [] if candidates.in_prompt else [late[..., candidates.known :]]
        return _raised(scores, candidates, *looks, _distinctions(candidates))


class ZapCAOTESnapKVKeyDiffPolicy(CAOTEPolicy):
    """Keep what a calibration predicts, and what each way of ``caote-snapkv-keydiff`` would keep.

    KVzap (https://arxiv.org/abs/2601.07891), CAOTE (https://arxiv.org/abs/2504.14051), SnapKV
    (https://arxiv.org/abs/2404.14469) and KeyDiff (https://arxiv.org/abs/2504.15364). Attention is collected
    as :class:`CAOTESnapKVKeyDiffPolicy` does, until a token is ranked; then its score is in the units of what
    is foretold, in which heads can share slots, and later queries add to it. Inside of a bounded prompt these
    are most of the prompt's, and facts go: there ``zap-keydiff`` is for.
    """

    name: ClassVar[str] = "zap-caote-snapkv-keydiff"
    late_prompt_queries: ClassVar[int | None] = WINDOW

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """What is foretold of fresh tokens, raised to the best of their ranks in the other ways."""
        weighed, known = super().eviction_scores(candidates), candidates.known
        if weighed.shape[-1] == known:
            return weighed
        others = [weighed[..., known:], *_looks(candidates), _distinctions(candidates)]
        return _raised(candidates.with_fresh(foretold(candidates)), candidates, *others)


def _distinctions(candidates: Candidates) -> Tensor:
    """[L, KH, C - known]."""
    return _KEYDIFF.eviction_scores(candidates)[..., candidates.known :]


def _looks(candidates: Candidates) -> list[Tensor]:
    """SnapKV's scores, [L, KH, C - known], of what is known apart; none before the prompt's end."""
    return [] if candidates.late is None else [pooled(candidates.late[..., candidates.known :])]


def _raised(scores: Tensor, candidates: Candidates, *others: Tensor) -> Tensor:
    """``scores`` with the fresh tokens' raised to what they would be by the best of their ranks.

    At equal ranks the ways come in their order: see :data:`BEHIND`.
    """
    fresh = scores[..., candidates.known :]
    values, best = fresh.sort(dim=-1, descending=True).values, fresh
    for way, other in enumerate(others, 1):
        order = other.sort(dim=-1, descending=True, stable=True).indices
        given = values * (1 - way * BEHIND)
        best = torch.maximum(best, torch.empty_like(fresh).scatter_(-1, order, given))
    return candidates.with_fresh(best)
