# SPDX-License-Identifier: Apache-2.0
"""What each policy's ``eviction_scores`` is to the GPU's kernel. Worker process; no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_vllm.engine.eviction_scores import candidate_blocks
from h2o_vllm.kernels.triton import BY_KEYS, BY_LATE, BY_RANKS, BY_VALUES, PER_QUERY, Rescore
from h2o_vllm.policy.snapkv import KERNEL

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction

__all__ = ["rescore_of"]

_HOW: dict[str, tuple[int, int]] = {
    "h2o-norm": (PER_QUERY, 0),
    "caote": (PER_QUERY | BY_VALUES, 0),
    "caote-keydiff": (PER_QUERY | BY_VALUES | BY_RANKS, 0),
    "keydiff": (BY_KEYS, 0),
    "snapkv": (0, KERNEL // 2),
    "snapkv-keydiff": (BY_RANKS, KERNEL // 2),
    "repeat-keydiff": (BY_RANKS, 0),
    "caote-snapkv-keydiff": (PER_QUERY | BY_VALUES | BY_RANKS | BY_LATE, KERNEL // 2),
}
"""Of every policy with ``scores_at_eviction``: ``how`` and ``reach``."""


def rescore_of(eviction: Eviction, slot: int = -1) -> Rescore:
    """The kernel's part of an eviction whose policy adjusts scores.

    Args:
        slot: the request's, if its KV heads share the slots of the blocks that are ranked again; else -1.
    """
    blocks = candidate_blocks(eviction)
    known = len(blocks) - len(eviction.fresh_blocks)
    how, reach = _HOW[eviction.policy]
    if how & BY_LATE and eviction.in_prompt:
        how, reach = how & ~BY_LATE, 0
    return Rescore(
        known=blocks[:known],
        fresh=blocks[known:],
        how=how,
        fresh_from=eviction.fresh_from,
        seen=eviction.seen,
        protected=max(0, eviction.sinks - eviction.fresh_from),
        reach=reach,
        slot=slot,
    )
