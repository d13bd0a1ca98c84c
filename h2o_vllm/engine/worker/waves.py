# SPDX-License-Identifier: Apache-2.0
"""Which evictions of a step a worker may compact at once. Worker process; imports nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction


def waves(evictions: Iterable[Eviction]) -> list[list[Eviction]]:
    """Divide a step's evictions into groups. Two evictions of one group never rank or write the same block.

    Evictions that have a block in common keep their order: the earlier one is in an earlier group.

    Each token has one score. If two evictions rank the same block, each computes its own scores, so the
    first must have moved its tokens before the second computes scores. If a segment settles into a block that
    another eviction of the step freed, that eviction must have read the block before. Both are rare (see
    :class:`h2o_vllm.blocks.plan.StepPlan`): there is nearly always one group.
    """
    found: list[list[Eviction]] = []
    turns: dict[int, int] = {}
    for eviction in evictions:
        turn = max((turns.get(block, 0) for block in eviction.ranked_blocks), default=0)
        if turn == len(found):
            found.append([])
        found[turn].append(eviction)
        turns.update(dict.fromkeys(eviction.ranked_blocks, turn + 1))
    return found
