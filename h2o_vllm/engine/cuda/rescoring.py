# SPDX-License-Identifier: Apache-2.0
"""Translates an eviction's ranks into operations of the GPU's rescoring kernel. Worker process; no vLLM."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from h2o_vllm.engine.worker.eviction_scores import candidate_blocks
from h2o_vllm.kernels.triton import Rescore
from h2o_vllm.policy.ranks import RANKS, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from h2o_vllm.blocks.plan import Eviction

__all__ = ["ops_of", "rescore_of"]


def ops_of(ranks: Sequence[int]) -> Op:
    """The operations of ``ranks``, which are indices into :data:`~h2o_vllm.policy.ranks.RANKS`."""
    # Ranks without one are refused at admission.
    ops = (RANKS[index].op for index in ranks)
    return reduce(or_, filter(None, ops), Op.NOTHING)


def rescore_of(eviction: Eviction, slot: int = -1, first_head: int = 0) -> Rescore:
    """The kernel's description of an eviction.

    Args:
        slot: the request's slot, if its KV heads share the slots of blocks that are ranked again; else -1.
        first_head: number of the first head of this worker's first layer, see :func:`.head_number`.
    """
    blocks = candidate_blocks(eviction)
    known = len(blocks) - len(eviction.fresh_blocks)
    return Rescore(
        known=blocks[:known],
        fresh=blocks[known:],
        ops=ops_of(eviction.ranks),
        fresh_from=eviction.fresh_from,
        seen=eviction.seen,
        first_head=first_head,
        slot=slot,
    )
