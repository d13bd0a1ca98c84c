# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Which candidates of an eviction survive: scores as ordered integers, and the lowest that survives."""

import triton
import triton.language as tl


@triton.jit
def _slot_of(blocks, lane, candidate, live, LANES: tl.constexpr, BS: tl.constexpr):
    """Physical slot, ``page * BS + offset``, of each candidate.

    ``blocks``: of which each has ``LANES`` pages, and this head has those of a ``lane``; or pages: 1 and 0.
    """
    page = tl.load(blocks + candidate // BS, mask=live, other=0) * LANES + lane
    return page * BS + candidate % BS


@triton.jit
def ranks_of(my_scores, blocks, lane, candidate, live, LANES: tl.constexpr, BS: tl.constexpr):
    """Scores as unsigned integers of the same order: NaN as -inf, -0 as 0; 0 for padding."""
    slot = _slot_of(blocks, lane, candidate, live, LANES, BS)
    bits = tl.load(my_scores + slot, mask=live, other=0.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    # The bits of negative floats are in reverse order. The flipped sign bit puts them below positive ones.
    flipped = tl.where(bits < 0, ~bits, bits | -0x80000000)
    # ~(bits of -inf), to which -inf maps.
    flipped = tl.where(magnitude > 0x7F800000, 0x007FFFFF, flipped)
    return tl.where(live, flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def lowest_survivor(
    my_scores, blocks, lane, keep, total,
    LANES: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """The lowest rank among the ``keep`` best of ``total`` candidates, and how many candidates rank higher.

    It is found bit by bit. ``ONE_CHUNK``: the candidates are in registers; else each bit reads them again.
    For ``lane`` and ``LANES`` see :func:`_slot_of`.
    """
    lanes = tl.arange(0, CHUNK)
    # Finds the highest threshold that at least `keep` candidates reach, from the top bit down. A candidate's
    # rank is never 0, so padding never counts.
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << 31, tl.uint32)
    if ONE_CHUNK:
        ranks = ranks_of(my_scores, blocks, lane, lanes, lanes < total, LANES, BS)
        for _ in range(32):
            higher = threshold | bit
            reached = tl.sum((ranks >= higher).to(tl.int32), 0)
            threshold = tl.where(reached >= keep, higher, threshold)
            bit = bit >> 1
        above = tl.sum((ranks > threshold).to(tl.int32), 0)
    else:
        for _ in range(32):
            higher = threshold | bit
            reached = 0
            for at in range(0, total, CHUNK):
                ranks = ranks_of(my_scores, blocks, lane, at + lanes, at + lanes < total, LANES, BS)
                reached += tl.sum((ranks >= higher).to(tl.int32), 0)
            threshold = tl.where(reached >= keep, higher, threshold)
            bit = bit >> 1
        above = 0
        for at in range(0, total, CHUNK):
            ranks = ranks_of(my_scores, blocks, lane, at + lanes, at + lanes < total, LANES, BS)
            above += tl.sum((ranks > threshold).to(tl.int32), 0)
    return threshold, above


@triton.jit
def list_moves(
    my_scores, blocks, lane, keep, total, kept, moves,
    LANES: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """List the moves of one head, pairs of slots from and to; returns the numbers of both.

    Args:
        keep: number of the ``total`` candidates that survive. kept: number of candidates, the first ones, in
            slots that the head keeps. Survivors there do not move; other survivors move to the free slots.
    """
    threshold, above = lowest_survivor(
        my_scores, blocks, lane, keep, total, LANES, BS, CHUNK, ONE_CHUNK
    )
    # In candidate order. Of candidates at the threshold the first ones survive. Survivors after the kept
    # slots and losers in kept slots are both numbered, and equal numbers form a move.
    ties_left = keep - above
    leavers = 0
    takers = 0
    for at in range(0, total, CHUNK):
        candidate = at + tl.arange(0, CHUNK)
        live = candidate < total
        ranks = ranks_of(my_scores, blocks, lane, candidate, live, LANES, BS)
        tie = (live & (ranks == threshold)).to(tl.int32)
        survives = live & ((ranks > threshold) | ((tie == 1) & (tl.cumsum(tie, 0) <= ties_left)))
        leaves = (survives & (candidate >= kept)).to(tl.int32)
        takes = (live & (survives == 0) & (candidate < kept)).to(tl.int32)
        slot = _slot_of(blocks, lane, candidate, live, LANES, BS)
        tl.store(moves + (leavers + tl.cumsum(leaves, 0) - 1) * 2, slot, mask=leaves == 1)
        tl.store(moves + (takers + tl.cumsum(takes, 0) - 1) * 2 + 1, slot, mask=takes == 1)
        ties_left -= tl.sum(tie, 0)
        leavers += tl.sum(leaves, 0)
        takers += tl.sum(takes, 0)
    return leavers, takers
