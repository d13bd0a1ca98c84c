# SPDX-License-Identifier: Apache-2.0
"""Make new scores just before an eviction ranks by them. Worker process.

CPU workers do; on GPUs :func:`h2o_vllm.kernels.triton.rescore` does the same, for all evictions of a step at
once, and is tested against this. No vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from h2o_vllm.policy.candidates import Candidates
from h2o_vllm.policy.formulas import new_scores
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import Collects

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction

__all__ = [
    "candidate_blocks",
    "early_part",
    "eviction_scores",
    "known_blocks",
]


def candidate_blocks(eviction: Eviction) -> list[int]:
    """The blocks an eviction ranks: those ranked before, then the fresh ones in table order."""
    return [*known_blocks(eviction), *eviction.fresh_blocks]


def known_blocks(eviction: Eviction) -> list[int]:
    """Those of the blocks that an earlier eviction has ranked; none if a segment settles."""
    if eviction.places:
        return []
    fresh = set(eviction.fresh_blocks)
    return [b for b in (*eviction.heavy_blocks, *eviction.doomed_blocks) if b not in fresh]


def eviction_scores(
    eviction: Eviction,
    scores: torch.Tensor,
    early: torch.Tensor,
    pages: torch.Tensor,
    key_similarity: Callable[[], torch.Tensor],
    value_distances: Callable[[], torch.Tensor],
    predicted: Callable[[], torch.Tensor] | None = None,
    first_head: int = 0,
    merge: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Adjust the scores of one eviction's candidates, in place.

    Args:
        scores: [L, N, KH, BS], float32, contiguous. early: the same, see :class:`.WorkerState`.
        pages: of each head, ``block * KH + lane``, [L, KH, n], on the device of ``scores``; the fresh
            ones last. Heads that share slots have different numbers of them: padding (-1) comes first.
        key_similarity, value_distances, predicted, first_head, merge: see :class:`.Candidates`; of
            ``pages``, in that order.
    """
    policy = Policy.of(eviction.ranks)
    layers, heads, count = pages.shape
    _, num_blocks, _, block_size = scores.shape
    there = (pages >= 0).flatten()
    padded = not there.all()
    first_pages = torch.arange(layers, device=pages.device) * (num_blocks * heads)
    where = (pages.clamp_min(0) + first_pages[:, None, None]).flatten()

    def of_tokens(plane: torch.Tensor) -> torch.Tensor:
        found = plane.view(-1, block_size).index_select(0, where)
        if padded:
            found[~there] = 0.0
        return found.view(layers, heads, -1)

    old, late = of_tokens(scores), None
    if any(rank.collects is Collects.END for rank in policy.ranks):
        # Where nothing but late attention is collected, all of a score is late.
        late = old - of_tokens(early) if policy.collects is Collects.ALL else old
    new = new_scores(
        eviction.ranks,
        Candidates(
            scores=old,
            known=(count - len(eviction.fresh_blocks)) * block_size,
            fresh_from=eviction.fresh_from,
            seen=eviction.seen,
            key_similarity=key_similarity,
            value_distances=value_distances,
            predicted=predicted,
            late=late,
            counts=(pages >= 0).sum(2, keepdim=True) * block_size if padded else None,
            first_head=first_head,
            merge=merge,
        ),
    )
    if new is not None:
        new = new.reshape(-1, block_size)
        if padded:
            where, new = where[there], new[there]
        scores.view(-1, block_size).index_copy_(0, where, new)


def early_part(scores: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """What is left of scores without the late queries' part."""
    return scores - late
