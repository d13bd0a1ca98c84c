# SPDX-License-Identifier: Apache-2.0
"""What each policy's ``eviction_scores`` is to the GPU's kernel. Worker process; no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_vllm.engine.eviction_scores import candidate_blocks
from h2o_vllm.kernels.triton import Rescore
from h2o_vllm.policy.ranks import Op

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction

__all__ = ["rescore_of"]

_HOW: dict[str, Op] = {
    "h2o-norm": Op.MEAN,
    "caote": Op.VALUE,
    "caote-keydiff": Op.VALUE | Op.KEY,
    "keydiff": Op.KEY,
    "snapkv": Op.END,
    "snapkv-keydiff": Op.END | Op.KEY,
    "caote-snapkv-keydiff": Op.VALUE | Op.END | Op.KEY,
}
"""Of every policy with ``scores_at_eviction``."""


def rescore_of(eviction: Eviction, slot: int = -1) -> Rescore:
    """The kernel's part of an eviction whose policy adjusts scores.

    Args:
        slot: the request's, if its KV heads share the slots of the blocks that are ranked again; else -1.
    """
    blocks = candidate_blocks(eviction)
    known = len(blocks) - len(eviction.fresh_blocks)
    ops = _HOW[eviction.policy]
    if eviction.in_prompt:
        ops &= ~Op.END
    return Rescore(
        known=blocks[:known],
        fresh=blocks[known:],
        ops=ops,
        fresh_from=eviction.fresh_from,
        seen=eviction.seen,
        protected=max(0, eviction.sinks - eviction.fresh_from),
        slot=slot,
    )
