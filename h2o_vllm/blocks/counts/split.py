# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request an eviction keeps and frees, from counts. Engine core; imports nothing."""

from typing import NamedTuple


class EvictionIndices(NamedTuple):
    """Table indices of one eviction, each list ascending.

    ``heavy`` blocks survive and receive the best tokens of both lists. If ``heavy`` is empty, nothing is
    copied. ``doomed`` blocks are freed. ``fresh`` are the indices among them that no earlier eviction has
    ranked; they are neighbours, but for the prompt's protected end.
    """

    heavy: tuple[int, ...]
    doomed: tuple[int, ...]
    fresh: tuple[int, ...] = ()


def fresh_blocks(
    ranked: list[int], places: range, end: range, num_doomed: int, *, first: bool
) -> tuple[int, ...]:
    """The blocks at ``places`` that this eviction ranks first: none of the prompt's protected ``end``.

    The heavy blocks always lie on one side of it, so they are neighbours in a table without holes: while some
    lie before it, blocks behind it are ranked only to be freed.

    Args:
        ranked: table indices of live blocks that evictions have ranked.
        end: table indices. num_doomed, first: as for :func:`rank_all`.
    """
    before = range(places.start, min(places.stop, end.start))
    behind = range(max(places.start, end.stop), places.stop)
    num_before = len(before) + sum(index < end.start for index in ranked)
    if num_before and not (first and num_before <= num_doomed):
        behind = behind[: 0 if first else num_doomed]
    return (*before, *behind)


def rank_all(candidates: list[int], num_doomed: int, *, first: bool) -> EvictionIndices:
    """Free the oldest blocks at the first eviction, the newest at every later one.

    Both choices keep the same tokens. The first eviction frees the oldest blocks: they are the published
    blocks of the prompt, which must not be written, as they stay valid prefix-cache entries. A later eviction
    frees the newest block: it has the fewest survivors to copy.

    Args:
        candidates: table indices of the live blocks before the recent window, ascending. All are full.
        num_doomed: how many to free, in ``1..len(candidates)``.
        first: whether this is the request's first eviction.
    """
    if first:
        return EvictionIndices(tuple(candidates[num_doomed:]), tuple(candidates[:num_doomed]))
    keep = len(candidates) - num_doomed
    return EvictionIndices(tuple(candidates[:keep]), tuple(candidates[keep:]))


def drop_oldest(candidates: list[int], num_doomed: int) -> EvictionIndices:
    """Free the oldest blocks, and copy nothing. The sequence's first block goes last.

    Args:
        candidates, num_doomed: as for :func:`rank_all`.
    """
    order = [i for i in candidates if i > 0] + [i for i in candidates if i == 0]
    return EvictionIndices((), tuple(sorted(order[:num_doomed])))
