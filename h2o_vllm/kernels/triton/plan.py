# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The plan of a decode step: which rows decode, split into which pieces. What it lies in: :mod:`.workspace`.

A piece is a run of one row's keys; one program attends one piece of one kv head. A fixed number of splits per
row would starve the GPU with few long rows and drown it in tiny programs with many short ones, and its
number would be frozen into the CUDA graph. So the grid is frozen at ``B + spare`` pieces, and the plan, made
on the GPU from the live lengths, cuts the rows so that all pieces are about equally long, and never more:

    piece length  C = max(MIN_PIECE, total live keys / spare)
    pieces        sum over rows of max(1, round(len / C))  <=  B + total / C  <=  B + spare

Rounded to the nearest, as a row that is a little longer than C is better left whole: its scores need no
second launch, and 64 rows of 2,048 keys take 0.94 of the time on an H200. No piece is longer than 1.5 C.

The pieces of rows that are cut come first: the second launch, which has nothing to do for the others, then
finds its work without looking for it.

Where the KV heads of a row share slots, each has its own length, another one in each layer. Then every layer
has a plan of its own, and what it cuts are not rows but heads of rows: the same bounds hold for them, as all
heads of a row together are as long as ever.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.lanes import EVERYWHERE, lanes_of

__all__ = ["FIELDS", "HEAD_FIELDS", "cut_pieces", "fits", "load_piece", "of_head", "plan_pieces"]

FIELDS = 9
"""Words of one piece: row, token, first key, end, the tile of the scratch where the row's first one is or
would be, the row's first piece, its number of pieces; how many pieces are those of rows that are cut; the
row's first key that is in the scratch. Row -1 = no piece.

Of plans of heads "row" means a head of one, and three more words are its number, the row's pinned blocks, or
:data:`.lanes.EVERYWHERE` if its heads share nothing, and where its list of keys would begin with these."""
HEAD_FIELDS = FIELDS + 3
_NOWHERE = tl.constexpr(-(1 << 24))
"""In place of a tile of the scratch, where a row does not fit. Less than that of any row whose first tiles
are left out, and a number of 32 bits in keys as well."""


@triton.jit
def load_piece(words, TILE: tl.constexpr):
    """The words of a piece behind its row, in their order; see :data:`FIELDS`.

    The row is the caller's to load: most programs of a frozen grid have none and leave at once. The last is
    its first key that is in the scratch.
    """
    token = tl.load(words + 1).to(tl.int64)
    start = tl.multiple_of(tl.load(words + 2), TILE)
    end = tl.load(words + 3)
    base = tl.load(words + 4)
    first = tl.load(words + 5)
    count = tl.load(words + 6)
    scored_from = tl.multiple_of(tl.load(words + 8), TILE)
    return token, start, end, base, first, count, scored_from


@triton.jit
def of_head(words, lane_keys, layer, stride_keys):
    """Of a piece in a plan of heads: which (64 bits), the row's pinned blocks, its list of keys.

    See :func:`.lanes.locate_listed`; ``lane_keys``: of all layers.
    """
    keys = lane_keys + layer.to(tl.int64) * stride_keys + tl.load(words + 11)
    return tl.load(words + 9).to(tl.int64), tl.load(words + 10), keys


@triton.jit
def fits(base):
    """Whether a row's keys, or those behind its pinned ones, are in the scratch."""
    return base > _NOWHERE


@triton.jit
def cut_pieces(pieces):
    """How many pieces, the first ones, are those of rows of several."""
    return tl.where(tl.load(pieces) < 0, 0, tl.load(pieces + 7))


@triton.jit
def _row_lengths(
    query_start_loc, seq_lens, lane_rows, lane_offsets, num_slots, rows, num_rows,
    KH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Live lengths of the rows that decode, else 0; their tokens; their pinned blocks if heads share slots.

    With lanes, of heads of rows.
    """
    inside = rows < num_rows
    pinned = tl.full(rows.shape, EVERYWHERE, tl.int32)
    if lane_rows is not None:
        heads = rows % KH
        rows = rows // KH
    token = tl.load(query_start_loc + rows, mask=inside, other=0)
    end = tl.load(query_start_loc + rows + 1, mask=inside, other=0)
    length = tl.load(seq_lens + rows, mask=inside, other=0)
    if lane_rows is not None:
        layer = tl.program_id(1)
        decodes = inside & (length > 0)
        before, heavy, _, count = lanes_of(
            lane_rows, lane_offsets, layer, num_slots, rows, heads, decodes, KH
        )
        length += (count - heavy) * BS
        pinned = tl.where(heavy > 0, before, pinned)
    return tl.where(end - token == 1, tl.maximum(length, 0), 0), token, pinned


@triton.jit
def _listed_blocks(length, pinned, BS: tl.constexpr):
    """Blocks of each head that have to be listed, 0 where heads share nothing."""
    listed = (length > 0) & (pinned < EVERYWHERE)
    return tl.where(listed, tl.cdiv(length, BS) - pinned, 0)


@triton.jit
def _cut(length, target, TILE: tl.constexpr):
    """Number of pieces and their length: all of a row's are equally long, no short one is left over."""
    parts = tl.maximum((length + target // 2) // target, 1)
    piece = ((length + parts - 1) // parts + TILE - 1) // TILE * TILE
    piece = tl.maximum(piece, TILE)
    return (length + piece - 1) // piece, piece


@triton.jit
def _flags_of(flags, rows, num_rows, KH: tl.constexpr):
    """Flags of the rows, or of the rows of these heads; or none."""
    found = tl.zeros_like(rows)
    if flags is not None:
        found = tl.load(flags + rows // KH, mask=rows < num_rows, other=0)
    return found


@triton.jit
def _scratch_tiles(length, flag, TILE: tl.constexpr, PINNED: tl.constexpr):
    """Tiles that a row takes of the scratch, and its first ones that are not in it."""
    tiles = (length + TILE - 1) // TILE
    left_out = tl.minimum(flag // (PINNED * TILE), tiles)
    return tiles - left_out, left_out


@triton.jit
def _apart(parts):
    """Pieces of rows of several pieces, and of rows of one."""
    return tl.where(parts > 1, parts, 0), tl.where(parts == 1, 1, 0)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_pieces", "spare", "max_tiles"])
def plan_pieces(  # noqa: PLR0915 - one kernel, in the order of what it does
    query_start_loc,
    seq_lens,
    flags,
    pieces,
    lane_rows,
    lane_offsets,
    num_slots,
    num_rows,
    num_pieces,
    spare,
    max_tiles,
    TILE: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    PINNED: tl.constexpr,
    KH: tl.constexpr,
    BS: tl.constexpr,
):
    """Each program writes the pieces of ROWS rows, or heads of rows; all of them count all rows."""
    if lane_rows is not None:
        pieces += tl.program_id(1).to(tl.int64) * num_pieces * FIELDS
    lane = tl.arange(0, ROWS)
    totals = tl.zeros([ROWS], tl.int32)
    for at in range(0, num_rows, ROWS):
        length, _, _ = _row_lengths(
            query_start_loc, seq_lens, lane_rows, lane_offsets, num_slots, at + lane, num_rows, KH, BS
        )  # fmt: skip
        totals += length
    target = tl.maximum((tl.sum(totals, 0) + spare - 1) // spare, MIN_PIECE)
    target = (target + TILE - 1) // TILE * TILE

    mine = tl.program_id(0) * ROWS
    cut_before = tl.zeros([ROWS], tl.int32)
    whole_before = tl.zeros([ROWS], tl.int32)
    tiles_before = tl.zeros([ROWS], tl.int32)
    cut_in_all = tl.zeros([ROWS], tl.int32)
    whole_in_all = tl.zeros([ROWS], tl.int32)
    listed_before = tl.zeros([ROWS], tl.int32)
    for at in range(0, num_rows, ROWS):
        length, _, pinned = _row_lengths(
            query_start_loc, seq_lens, lane_rows, lane_offsets, num_slots, at + lane, num_rows, KH, BS
        )  # fmt: skip
        parts, _ = _cut(length, target, TILE)
        cut, whole = _apart(parts)
        cut_in_all += cut
        whole_in_all += whole
        cut_before += tl.where(at < mine, cut, 0)
        whole_before += tl.where(at < mine, whole, 0)
        tiles, _ = _scratch_tiles(length, _flags_of(flags, at + lane, num_rows, KH), TILE, PINNED)
        tiles_before += tl.where(at < mine, tiles, 0)
        if lane_rows is not None:
            listed_before += tl.where(at < mine, _listed_blocks(length, pinned, BS), 0)

    row = mine + lane
    length, token, pinned = _row_lengths(
        query_start_loc, seq_lens, lane_rows, lane_offsets, num_slots, row, num_rows, KH, BS
    )  # fmt: skip
    parts, piece = _cut(length, target, TILE)
    cut, whole = _apart(parts)
    num_cut = tl.sum(cut_in_all, 0)
    first_cut = tl.sum(cut_before, 0) + tl.cumsum(cut, 0) - cut
    first_whole = num_cut + tl.sum(whole_before, 0) + tl.cumsum(whole, 0) - whole
    first = tl.where(parts > 1, first_cut, first_whole)
    tiles, left_out = _scratch_tiles(length, _flags_of(flags, row, num_rows, KH), TILE, PINNED)
    base = tl.sum(tiles_before, 0) + tl.cumsum(tiles, 0) - tiles
    base = tl.where(base + tiles <= max_tiles, base - left_out, _NOWHERE)
    if lane_rows is not None:
        listed = _listed_blocks(length, pinned, BS)
        begin = tl.sum(listed_before, 0) + tl.cumsum(listed, 0) - listed - pinned
    for part in range(tl.max(parts, 0)):
        words = pieces + (first + part) * FIELDS
        real = part < parts
        tl.store(words, row // KH, mask=real)
        tl.store(words + 1, token, mask=real)
        tl.store(words + 2, part * piece, mask=real)
        tl.store(words + 3, tl.minimum((part + 1) * piece, length), mask=real)
        tl.store(words + 4, base, mask=real)
        tl.store(words + 5, first, mask=real)
        tl.store(words + 6, parts, mask=real)
        tl.store(words + 7, num_cut, mask=real)
        tl.store(words + 8, left_out * TILE, mask=real)
        if lane_rows is not None:
            tl.store(words + 9, row % KH, mask=real)
            tl.store(words + 10, pinned, mask=real)
            tl.store(words + 11, begin, mask=real)

    # What an earlier plan left behind the last piece.
    for at in range(
        num_cut + tl.sum(whole_in_all, 0) + mine, num_pieces, tl.num_programs(0) * ROWS
    ):
        tl.store(pieces + (at + lane) * FIELDS, -1, mask=at + lane < num_pieces)
