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
    "shared_eviction_scores",
]


def candidate_blocks(eviction: Eviction) -> list[int]:
    """The blocks an eviction ranks: those ranked before, then the fresh ones in table order."""
    return [*known_blocks(eviction), *eviction.fresh_blocks]


def known_blocks(eviction: Eviction) -> list[int]:
    """Those of the blocks that an earlier eviction has ranked."""
    fresh = set(eviction.fresh_blocks)
    return [b for b in (*eviction.heavy_blocks, *eviction.doomed_blocks) if b not in fresh]


def eviction_scores(
    eviction: Eviction,
    scores: torch.Tensor,
    early: torch.Tensor,
    blocks: torch.Tensor,
    key_similarity: Callable[[], torch.Tensor],
    value_distances: Callable[[], torch.Tensor],
    predicted: Callable[[], torch.Tensor] | None = None,
    first_kv_head: int = 0,
) -> None:
    """Adjust the scores of one eviction's candidates, in place.

    Args:
        scores: [L, N, KH, BS], float32. early: the same, see :class:`.WorkerState`.
        blocks: :func:`candidate_blocks`, int64, on the device of ``scores``.
        key_similarity, value_distances, predicted, first_kv_head: see :class:`.Candidates`; of ``blocks``, in
            that order.
    """
    new = _new_scores(
        eviction,
        scores.index_select(1, blocks).transpose(1, 2),
        lambda: early.index_select(1, blocks).transpose(1, 2),
        key_similarity,
        value_distances,
        predicted,
        first_kv_head=first_kv_head,
    )
    if new is not None:
        scores.index_copy_(1, blocks, new.transpose(1, 2))


def shared_eviction_scores(
    eviction: Eviction,
    scores: torch.Tensor,
    early: torch.Tensor,
    pages: torch.Tensor,
    key_similarity: Callable[[], torch.Tensor],
    value_distances: Callable[[], torch.Tensor],
    predicted: Callable[[], torch.Tensor] | None = None,
) -> None:
    """As :func:`eviction_scores` where heads share slots, and have different numbers of candidates.

    Args:
        pages: of each head, ``block * KH + lane``, [L, KH, n]; the fresh blocks' last, padding (-1) first.
    """
    there, layers = pages >= 0, torch.arange(len(pages))[:, None, None]
    where = (layers, pages.clamp_min(0).long())

    def of_pages(plane: torch.Tensor) -> torch.Tensor:
        return plane.flatten(1, 2)[where].masked_fill(~there[..., None], 0.0)

    counts = there.sum(2, keepdim=True) * scores.shape[3]
    new = _new_scores(
        eviction,
        of_pages(scores),
        lambda: of_pages(early),
        key_similarity,
        value_distances,
        predicted,
        counts,
    )
    if new is not None:
        layer, _, _ = there.nonzero(as_tuple=True)
        scores.flatten(1, 2)[layer, pages[there].long()] = new[there]


def _new_scores(
    eviction: Eviction,
    old: torch.Tensor,
    early: Callable[[], torch.Tensor],
    key_similarity: Callable[[], torch.Tensor],
    value_distances: Callable[[], torch.Tensor],
    predicted: Callable[[], torch.Tensor] | None,
    counts: torch.Tensor | None = None,
    first_kv_head: int = 0,
) -> torch.Tensor | None:
    """New scores of the candidates with the ``old`` ones, [L, KH, n, BS], of which the fresh ones are last.

    Args:
        early: their part in the other plane, which few policies want.
        counts, first_kv_head: see :class:`.Candidates`.
    """
    policy = Policy.of(eviction.ranks)
    layers, heads, count, block_size = old.shape

    def of_tokens(scores: torch.Tensor) -> torch.Tensor:
        return scores.reshape(layers, heads, -1)

    late = None
    if any(rank.collects is Collects.END for rank in policy.ranks):
        # Where nothing but late attention is collected, all of a score is late.
        late = of_tokens(old - early() if policy.collects is Collects.ALL else old)
    new = new_scores(
        eviction.ranks,
        Candidates(
            scores=of_tokens(old),
            known=(count - len(eviction.fresh_blocks)) * block_size,
            fresh_from=eviction.fresh_from,
            seen=eviction.seen,
            key_similarity=key_similarity,
            value_distances=value_distances,
            predicted=predicted,
            late=late,
            counts=counts,
            first_kv_head=first_kv_head,
        ),
    )
    return None if new is None else new.view(old.shape)


def early_part(scores: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """What is left of scores without the late queries' part."""
    return scores - late
