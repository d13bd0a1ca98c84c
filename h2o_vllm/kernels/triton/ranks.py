# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The second and third launch of rescoring: ranks of fresh tokens, and the scores that follow from them.

Per (layer, head) the scratch holds lists of ``room`` numbers: sums, scores by keys, the sums in order, ranks
by keys; and where late queries are known apart, scores and ranks by them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_vllm.kernels.triton import rescores as told
from h2o_vllm.kernels.triton.candidates import SIZES, my_part, place_of, unprotected

__all__ = ["order_ranks", "settle_scores"]

_BY_RANKS = tl.constexpr(told.BY_RANKS)
_BY_LATE = tl.constexpr(told.BY_LATE)
_BEHIND = tl.constexpr(2.0**-20)
"""As in the policies."""


@triton.jit
def _places(list_, mine, count, COLUMNS: tl.constexpr):
    """How many of a list's ``count`` numbers rank before those at ``mine``: larger, or equal and earlier."""
    numbers = tl.load(list_ + mine, mask=mine < count, other=0.0)[:, None]
    places = tl.zeros_like(mine)
    for at in range(0, count, COLUMNS):
        other = at + tl.arange(0, COLUMNS)
        others = tl.load(list_ + other, mask=other < count, other=0.0)[None, :]
        earlier = other[None, :] < mine[:, None]
        before = (others > numbers) | ((others == numbers) & earlier)
        places += tl.sum((before & (other < count)[None, :]).to(tl.int32), 1)
    return places


@triton.jit(do_not_specialize=SIZES)
def order_ranks(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    room,
    lists,
    KH: tl.constexpr,
    BS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Ranks of some fresh tokens that are ranked in several ways, by counting who ranks before them."""
    _, _, entry, _, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, lists, KH, BS
    )  # fmt: skip
    how = tl.load(entry + 2)
    count = (tl.load(entry + 1) - tl.load(entry)) * BS
    first = tl.program_id(1) * ROWS
    if ((how & _BY_RANKS) == 0) | (first >= count):
        return
    mine = first + tl.arange(0, ROWS)
    by_sum = _places(staged, mine, count, COLUMNS)
    sums = tl.load(staged + mine, mask=mine < count, other=0.0)
    tl.store(staged + 2 * room + by_sum, sums, mask=mine < count)
    # Exact below 2^24.
    by_key = _places(staged + room, mine, count, COLUMNS)
    tl.store(staged + 3 * room + mine, by_key.to(tl.float32), mask=mine < count)
    if (how & _BY_LATE) != 0:
        by_late = _places(staged + 4 * room, mine, count, COLUMNS)
        tl.store(staged + 5 * room + mine, by_late.to(tl.float32), mask=mine < count)


@triton.jit(do_not_specialize=SIZES)
def settle_scores(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    room,
    lists,
    KH: tl.constexpr,
    BS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write back the scores of some fresh tokens that went through the scratch."""
    _, _, entry, my_scores, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, lists, KH, BS
    )  # fmt: skip
    known = tl.load(entry) * BS
    count = tl.load(entry + 1) * BS - known
    how = tl.load(entry + 2)
    by_ranks = (how & _BY_RANKS) != 0
    if (by_ranks == 0) & (tl.load(entry + 6) == 0):
        return
    mine = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = mine < count
    new = tl.load(staged + mine, mask=live, other=0.0)
    if by_ranks:
        in_order = staged + 2 * room
        if (how & _BY_LATE) != 0:
            by_late = tl.load(staged + 5 * room + mine, mask=live, other=0.0).to(tl.int32)
            there = tl.load(in_order + by_late, mask=live, other=0.0)
            new = tl.maximum(new, there * (1.0 - _BEHIND))
        by_key = tl.load(staged + 3 * room + mine, mask=live, other=0.0).to(tl.int32)
        there = tl.load(in_order + by_key, mask=live, other=0.0)
        ways = tl.where((how & _BY_LATE) != 0, 2.0, 1.0)
        new = tl.maximum(new, there * (1.0 - ways * _BEHIND))
    block, slot = place_of(entry, known + mine, live, BS)
    _, infinite = unprotected(my_scores, block, slot, live, KH, BS)
    tl.store(my_scores + block * (KH * BS) + slot, new, mask=live & (infinite == 0))
