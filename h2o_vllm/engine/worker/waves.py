# SPDX-License-Identifier: Apache-2.0
"""Which evictions of a step a worker may compact at once. Worker process; imports nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction

__all__ = ["waves"]


def waves(evictions: Iterable[Eviction]) -> list[list[Eviction]]:
    """Cut a step's evictions into groups in which no two rank or write one block; those that do keep order.

    Scores lie beside the tokens, one for each. So of two requests that rank a block, each by scores that it
    makes for itself, one has to have moved its tokens before the other makes its own. Only doomed blocks are
    ever shared (see :class:`h2o_vllm.blocks.plan.StepPlan`), by requests with one beginning that evict for
    the first time: there is nearly always one wave.
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
