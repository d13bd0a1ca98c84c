# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The second and third launch of rescoring: ranks of fresh tokens, and the scores that follow from them.

Per (layer, head) the scratch holds two lists of ``room`` numbers for each of an eviction's ranks: scores by
it, and tokens' ranks; of the first rank, in their place, its scores in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.candidates import SIZES, list_of, my_part, place_of
from h2o_vllm.policy.ranks import Op

__all__ = ["order_ranks", "settle_scores"]

_END = tl.constexpr(int(Op.END))
_ALL = tl.constexpr(1 << 8)
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
    ranks = list_of(tl.load(entry + 2), _ALL)
    count = (tl.load(entry + 1) - tl.load(entry)) * BS
    first = tl.program_id(1) * ROWS
    if (ranks < 2) | (first >= count):
        return
    mine = first + tl.arange(0, ROWS)
    by_first = _places(staged, mine, count, COLUMNS)
    scores_by_first = tl.load(staged + mine, mask=mine < count, other=0.0)
    tl.store(staged + room + by_first, scores_by_first, mask=mine < count)
    for rank in range(1, ranks):
        list_ = staged + 2 * rank * room
        places = _places(list_, mine, count, COLUMNS)
        # Exact below 2^24.
        tl.store(list_ + room + mine, places.to(tl.float32), mask=mine < count)


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
    ops = tl.load(entry + 2)
    ranks = list_of(ops, _ALL)
    if (ranks < 2) & ((ops & _END) == 0):
        return
    mine = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = mine < count
    new = tl.load(staged + mine, mask=live, other=0.0)
    less = 1.0
    for rank in range(1, ranks):
        less -= _BEHIND
        place = tl.load(staged + (2 * rank + 1) * room + mine, mask=live, other=0.0).to(tl.int32)
        there = tl.load(staged + room + place, mask=live, other=0.0)
        new = tl.maximum(new, there * less)
    block, slot = place_of(entry, known + mine, live, BS)
    tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)
