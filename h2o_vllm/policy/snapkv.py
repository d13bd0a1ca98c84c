# SPDX-License-Identifier: Apache-2.0
"""SnapKV: what the end of the prompt looks at (Li et al., NeurIPS 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from h2o_vllm.policy.h2o import H2OPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["SnapKVPolicy"]

WINDOW = 32
"""Observation window: the prompt queries that are scored. ``window_size`` of the authors' experiments."""

KERNEL = 7
"""Width of the max pooling, the token itself in its middle. ``kernel_size`` of the same."""

NEARER = 2.0**-18
"""How much less of a neighbour's score counts with each step away from it, so that those around one hit do
not tie: see :func:`pooled`."""


class SnapKVPolicy(H2OPolicy):
    """Keep the tokens, with their neighbours, that the prompt's last queries attend to.

    SnapKV (https://arxiv.org/abs/2404.14469) sums the attention of the prompt's last 32 queries and
    takes the maximum over 7 neighbouring tokens, so that what surrounds a hit stays as well. It
    compresses prompts only. Beyond the paper: generated tokens' queries are added to the scores as
    they come, so that evictions can go on while tokens are generated; a token is pooled
    once, when it is ranked for the first time; query heads that share a KV head are summed. The
    paper always keeps the observation window; here ``kv_recent`` says how much is always kept.
    """

    name: ClassVar[str] = "snapkv"
    scored_prompt_queries: ClassVar[int | None] = WINDOW
    scores_at_eviction: ClassVar[bool] = True

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """Pool the fresh tokens, whose neighbours in memory are still those in the text."""
        fresh = candidates.scores[..., candidates.known :]
        if fresh.shape[-1] == 0:
            return None
        return candidates.with_fresh(pooled(fresh))


def pooled(fresh: Tensor) -> Tensor:
    """The highest score of each token's neighbourhood, [L, KH, n]; at the ends it has one half.

    Up to seven tokens around a hit would have one score, as long as later queries add nothing that float32
    can tell apart, and who of them stays would be a matter of where they lie. So a score counts a little less
    for a neighbour, by :data:`NEARER` of its size per step; the steps go to the token behind it, the one
    before it, the second behind it, ...
    """
    reach, count = KERNEL // 2, fresh.shape[-1]
    padded, highest = F.pad(fresh, (reach, reach), value=float("-inf")), fresh
    for away in range(-reach, reach + 1):
        steps = max(2 * away, -2 * away - 1)
        theirs = padded[..., reach + away : reach + away + count]
        highest = torch.maximum(highest, theirs * (1 - steps * NEARER))
    return highest
