# SPDX-License-Identifier: Apache-2.0
"""Which of a request's blocks an eviction keeps and frees, from counts. Engine core; imports nothing."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BlockSplit", "drop_oldest", "rank_all"]


class BlockSplit(NamedTuple):
    """Table indices of one eviction, both ascending. They never overlap.

    ``heavy`` blocks survive and receive the best tokens of both lists; an empty ``heavy`` means that nothing
    is copied. ``doomed`` blocks are freed.
    """

    heavy: tuple[int, ...]
    doomed: tuple[int, ...]


def rank_all(candidates: list[int], num_doomed: int, *, first: bool) -> BlockSplit:
    """Free the oldest blocks at the first eviction, the youngest at every later one.

    The set of kept tokens is the same either way. At first the oldest blocks go because they are the prompt's
    published ones, which must not be written (they stay valid prefix-cache entries); later the youngest goes
    because it is the one with the fewest survivors to copy.

    Args:
        candidates: table indices of the live blocks before the recent window, ascending; all are full.
        num_doomed: how many to free, in ``1..len(candidates)``.
        first: whether this is the request's first eviction.
    """
    if first:
        return BlockSplit(tuple(candidates[num_doomed:]), tuple(candidates[:num_doomed]))
    keep = len(candidates) - num_doomed
    return BlockSplit(tuple(candidates[:keep]), tuple(candidates[keep:]))


def drop_oldest(candidates: list[int], num_doomed: int) -> BlockSplit:
    """Free the oldest blocks behind the sequence's first one, in place; the first one goes only if it must.

    Args:
        candidates, num_doomed: as for :func:`rank_all`.
    """
    order = [i for i in candidates if i > 0] + [i for i in candidates if i == 0]
    return BlockSplit((), tuple(sorted(order[:num_doomed])))
