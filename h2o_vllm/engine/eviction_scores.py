# SPDX-License-Identifier: Apache-2.0
"""Ask a policy for new scores just before an eviction ranks by them. Worker process.

CPU workers do; on GPUs :func:`h2o_vllm.kernels.triton.rescore` does the same, for all evictions of a step at
once, and is tested against this. No vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from h2o_vllm.policy import Candidates, Policy

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction

__all__ = ["candidate_blocks", "cleared", "early_part", "eviction_scores"]


def candidate_blocks(eviction: Eviction) -> list[int]:
    """The blocks an eviction ranks: those ranked before, then the fresh ones in table order."""
    fresh = set(eviction.fresh_blocks)
    known = [b for b in (*eviction.heavy_blocks, *eviction.doomed_blocks) if b not in fresh]
    return [*known, *eviction.fresh_blocks]


def eviction_scores(
    policy: Policy,
    eviction: Eviction,
    scores: torch.Tensor,
    early: torch.Tensor,
    blocks: torch.Tensor,
    key_likeness: Callable[[], torch.Tensor],
    value_distances: Callable[[], torch.Tensor],
) -> None:
    """Let ``policy`` adjust the scores of one eviction's candidates, in place.

    Args:
        scores: [L, N, KH, BS], float32. early: the same, see :class:`h2o_vllm.engine.state.WorkerState`.
        blocks: :func:`candidate_blocks`, int64, on the device of ``scores``.
        key_likeness, value_distances: see :class:`.Candidates`; of ``blocks``, in that order.
    """
    old = scores.index_select(1, blocks)
    layers, count, heads, block_size = old.shape
    # Protected tokens: not to be spread over their neighbours, not to be lost.
    protected = old == float("inf")
    if not policy.needs_scores:
        # Blocks from the prefix cache have scores of others: the first tokens are told by their positions.
        places = torch.arange(len(eviction.fresh_blocks) * block_size, device=scores.device)
        first = (places < eviction.sinks - eviction.fresh_from).view(-1, 1, block_size)
        protected[:, count - len(eviction.fresh_blocks) :] = first

    def of_tokens(old: torch.Tensor) -> torch.Tensor:
        return old.masked_fill(protected, 0.0).transpose(1, 2).reshape(layers, heads, -1)

    late = None
    if policy.late_prompt_queries is not None and not eviction.in_prompt:
        late = of_tokens(old - early.index_select(1, blocks))
    new = policy.eviction_scores(
        Candidates(
            scores=of_tokens(old),
            known=(count - len(eviction.fresh_blocks)) * block_size,
            fresh_from=eviction.fresh_from,
            seen=eviction.seen,
            key_likeness=key_likeness,
            value_distances=value_distances,
            late=late,
        )
    )
    if new is not None:
        new = new.view(layers, heads, count, block_size).transpose(1, 2)
        scores.index_copy_(1, blocks, new.masked_fill(protected, float("inf")))


def cleared(scores: torch.Tensor) -> torch.Tensor:
    """Zero, but for protected tokens: what a step starts with if the newest query alone counts."""
    return torch.where(scores == float("inf"), scores, 0.0)


def early_part(scores: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """What is left of scores without the late queries' part; 0 for protected tokens."""
    return torch.where(scores == float("inf"), 0.0, scores - late)
