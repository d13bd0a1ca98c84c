# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Ranks of fresh tokens by several measures, by sorting, and the joined scores.

Per (layer, head) the scratch holds two lists of ``room`` numbers for each of an eviction's ranks: the scores
by that rank, and the tokens' places in its order. If there are several ranks, the sorted scores of the first
one follow.

Each tile is sorted by itself. Then a binary search in each tile counts the tokens that come before a given
one. That takes ``log2(TILE) / TILE`` of the comparisons of all with all. One program per tile, rank and head
fills a GPU at any length.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.candidates import (
    SIZES,
    list_of,
    my_part,
    place_of,
    segments_of,
)
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.policy.ranks import Op

__all__ = ["FEW", "order_ranks"]

_ALL = tl.constexpr(1 << 8)
_END = tl.constexpr(int(Op.END))
_VALUE = tl.constexpr(int(Op.VALUE))
_BEFORE_VALUE = tl.constexpr(int(Op.VALUE) - 1)
_BEHIND = tl.constexpr(2.0**-20)
"""As in :mod:`h2o_vllm.policy.formulas`."""
FEW = 64
TILES = (FEW, 1024)
"""Tokens that one program sorts: the smaller size if it holds all of them, else the larger."""
_SETTLED = 1024
"""Tokens whose scores one program writes back from the scratch."""


def order_ranks(
    programs: int, room: int, ranks: int, segments: int, given: tuple[Any, ...], **sizes: int
) -> None:
    """Rank the fresh tokens of some (eviction, layer, head) in the scratch, and write back their scores.

    Args:
        programs: number of (eviction, layer, head). room: numbers per list, at least the most fresh tokens.
        ranks: the most ranks of one eviction. segments: number of sums of values' distances to add up.
        given: the first arguments of all rescoring kernels.
    """
    if ranks > 1:
        alone = room <= TILES[0]
        tile = TILES[0] if alone else TILES[1]
        grid = (programs, -(-room // tile), ranks)
        sorts = {"TILE": tile, "ALONE": alone, **sizes}
        launch(_sort_tiles, grid, tuple(sorts.values()), (*given, room), sorts)
        if not alone:
            finds = {"TILE": tile, "HALVINGS": tile.bit_length() - 1, **sizes}
            launch(_find_places, grid, tuple(finds.values()), (*given, room), finds)
    settles = {"TILE": _SETTLED, **sizes}
    tiles = (programs, -(-room // _SETTLED))
    launch(_settle_scores, tiles, tuple(settles.values()), (*given, room, segments), settles)


@triton.jit
def _my_list(entry, staged, room, BS: tl.constexpr):
    """This program's list of scores, the sorted scores, and the number of tokens to rank."""
    rank = tl.program_id(2)
    ranks = list_of(tl.load(entry + 2), _ALL)
    count = (tl.load(entry + 1) - tl.load(entry)) * BS
    count = tl.where((ranks > 1) & (rank < ranks), count, 0)
    return staged + 2 * rank * room, staged + 2 * ranks * room, count


@triton.jit(do_not_specialize=[*SIZES, "room"])
def _sort_tiles(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    part,
    room,
    KH: tl.constexpr,
    BS: tl.constexpr,
    TILE: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Sort a tile of one rank's scores: highest first, of equal ones the earlier token first.

    Writes the sorted scores, and for each of them the index of its token in the tile; for the only tile
    (``ALONE``) the tokens' final places.
    """
    _, _, entry, _, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, part, KH, BS
    )  # fmt: skip
    list_, in_order, count = _my_list(entry, staged, room, BS)
    first = tl.program_id(1) * TILE
    if first >= count:
        return
    mine = tl.arange(0, TILE)
    found = tl.load(list_ + first + mine, mask=first + mine < count, other=float("-inf"))
    # -0.0 equals 0.0, but their bits differ.
    bits = tl.where(found == 0.0, 0.0, found).to(tl.int32, bitcast=True)
    # Integers in the reverse order of the numbers; the token's index breaks ties.
    high = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    ordered = tl.sort((high.to(tl.int64) << 32) | mine.to(tl.int64))
    token = (ordered & 0x7FFFFFFF).to(tl.int32)
    high = ~(ordered >> 32).to(tl.int32)
    found = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    live = first + mine < count
    # Exact below 2^24.
    if ALONE:
        tl.store(list_ + room + token, mine.to(tl.float32), mask=live)
        if tl.program_id(2) == 0:
            tl.store(in_order + mine, found, mask=live)
    else:
        tl.store(list_ + first + mine, found, mask=live)
        tl.store(list_ + room + first + mine, token.to(tl.float32), mask=live)


@triton.jit
def _before(list_, length, found, or_equal, TILE: tl.constexpr, HALVINGS: tl.constexpr):
    """How many of a sorted tile's scores are above (``or_equal``: or equal to) each of ``found``."""
    place = tl.zeros_like(found).to(tl.int32)
    for halving in tl.static_range(HALVINGS + 1):
        probe = place + ((TILE >> halving) - 1)
        there = probe < length
        other = tl.load(list_ + probe, mask=there, other=float("-inf"))
        before = there & ((other > found) | (or_equal & (other == found)))
        place += tl.where(before, TILE >> halving, 0)
    return place


@triton.jit(do_not_specialize=[*SIZES, "room"])
def _find_places(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    part,
    room,
    KH: tl.constexpr,
    BS: tl.constexpr,
    TILE: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """Places of a sorted tile's tokens among all tokens; for the first rank also the sorted scores."""
    _, _, entry, _, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, part, KH, BS
    )  # fmt: skip
    list_, in_order, count = _my_list(entry, staged, room, BS)
    first = tl.program_id(1) * TILE
    if first >= count:
        return
    mine = tl.arange(0, TILE)
    live = first + mine < count
    found = tl.load(list_ + first + mine, mask=live, other=0.0)
    token = first + tl.load(list_ + room + first + mine, mask=live, other=0.0).to(tl.int32)
    # Places overwrite the indices that have just been read.
    tl.debug_barrier()
    places = mine
    for other in range(0, count, TILE):
        if other != first:
            # Of equal scores those of earlier tokens come first.
            length = tl.minimum(count - other, TILE)
            places += _before(list_ + other, length, found, other < first, TILE, HALVINGS)
    tl.store(list_ + room + token, places.to(tl.float32), mask=live)
    if tl.program_id(2) == 0:
        tl.store(in_order + places, found, mask=live)


@triton.jit(do_not_specialize=[*SIZES, "room", "segments"])
def _settle_scores(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    part,
    room,
    segments,
    KH: tl.constexpr,
    BS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write back the scores of some fresh tokens from the scratch."""
    _, _, entry, my_scores, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, part, KH, BS
    )  # fmt: skip
    known = tl.load(entry) * BS
    count = tl.load(entry + 1) * BS - known
    ops = tl.load(entry + 2)
    ranks = list_of(ops, _ALL)
    first = tl.program_id(1) * TILE
    if ((ranks < 2) & ((ops & (_END | _VALUE)) == 0)) | (first >= count):
        return
    mine = first + tl.arange(0, TILE)
    live = mine < count
    if ranks < 2:
        new = tl.load(staged + mine, mask=live, other=0.0)
    else:
        in_order = staged + 2 * ranks * room
        new = tl.full([TILE], float("-inf"), tl.float32)
        less = 1.0
        for rank in range(ranks):
            place = tl.load(staged + (2 * rank + 1) * room + mine, mask=live, other=0.0).to(
                tl.int32
            )
            new = tl.maximum(new, tl.load(in_order + place, mask=live, other=0.0) * less)
            less -= _BEHIND
    if ((ops & _VALUE) != 0) & ((ops & _BEFORE_VALUE) == 0):
        # If the first rank is ``value``, its scores are not yet divided by the mean distance.
        distance = 0.0
        for segment in range(segments_of(entry, segments, BS)):
            distance += tl.load(staged + part - 1 - segment)
        new /= tl.maximum(distance, 1e-20)
    block, slot = place_of(entry, known + mine, live, BS)
    tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)
