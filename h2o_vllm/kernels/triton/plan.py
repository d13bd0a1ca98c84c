# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The plan of a decode step: the rows that decode, and their pieces. :mod:`.workspace` holds its memory.

A piece is a run of one row's keys. One program attends one piece of one KV head. A fixed number of pieces per
row would leave the GPU idle with few long rows, and give it many tiny programs with many short rows; and a
CUDA graph would fix that number. So a graph fixes the grid at ``B + spare`` pieces, and the plan, made on the
GPU from the live lengths, cuts the rows into pieces of about equal length that always fit the grid:

    piece length  C = max(MIN_PIECE, total live keys / spare)
    pieces        sum over rows of max(1, round(len / C))  <=  B + total / C  <=  B + spare

The number of pieces is rounded to the nearest: a row that is little longer than C stays whole, as the scores
of a whole row need no second launch. On an H200 64 rows of 2,048 keys then take 0.94 of the time. No piece is
longer than 1.5 C.

The pieces of rows that are cut come first. Only they have work for the second launch, which so finds its work
without a search.

If the KV heads of a row share slots, each head has another length in each layer. Then each layer has a plan
of its own, which cuts heads of rows in place of rows. The same bounds hold, as the total length of a row's
heads does not change.
"""

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.lanes import EVERYWHERE, lanes_of

FIELDS = 9
"""Words of one piece: row (-1: no piece), token, first key, end, tile of the scratch where the row's first
tile is or would be, the row's first piece, its number of pieces, number of all pieces of cut rows, and the
row's first key that is in the scratch.

In a plan of heads, "row" means one head of a row, and there are three more words: the number of the head, the
row's pinned blocks (:data:`.lanes.EVERYWHERE` if its heads share nothing), and where its list of keys would
begin if it had the pinned blocks."""
HEAD_FIELDS = FIELDS + 3
_NOWHERE = tl.constexpr(-(1 << 24))
"""Tile of the scratch for a row that does not fit. It is less than the tile of any row whose first tiles are
left out, and also fits 32 bits when counted in keys."""


@triton.jit
def load_piece(words, TILE: tl.constexpr):
    """The words of a piece after its row, in order; see :data:`FIELDS`.

    The caller loads the row first: most programs of a fixed grid have none, and return at once. The last
    result is the row's first key that is in the scratch.
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
    """For a piece in a plan of heads: the head (64 bits), the row's pinned blocks, the head's list of keys.

    See :func:`.lanes.locate_listed`. ``lane_keys``: the lists of all layers.
    """
    keys = lane_keys + layer.to(tl.int64) * stride_keys + tl.load(words + 11)
    return tl.load(words + 9).to(tl.int64), tl.load(words + 10), keys


@triton.jit
def fits(base):
    """Whether a row's keys, or those after its pinned ones, are in the scratch."""
    return base > _NOWHERE


@triton.jit
def cut_pieces(pieces):
    """Number of pieces of cut rows; they come first."""
    return tl.where(tl.load(pieces) < 0, 0, tl.load(pieces + 7))


@triton.jit
def _row_lengths(
    query_start_loc, seq_lens, lane_rows, lane_offsets, num_slots, rows, num_rows,
    KH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Per row: live length (0 if it does not decode here), token, and pinned blocks if heads share slots.

    With lanes the same per head of a row.
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
    """Number of blocks to list per head, 0 if heads share nothing."""
    listed = (length > 0) & (pinned < EVERYWHERE)
    return tl.where(listed, tl.cdiv(length, BS) - pinned, 0)


@triton.jit
def _cut(length, target, TILE: tl.constexpr):
    """Number of pieces and their length: the pieces of a row have equal lengths, without a short rest."""
    parts = tl.maximum((length + target // 2) // target, 1)
    piece = ((length + parts - 1) // parts + TILE - 1) // TILE * TILE
    piece = tl.maximum(piece, TILE)
    return (length + piece - 1) // piece, piece


@triton.jit
def _scratch_tiles(
    length, flags, rows, num_rows, KH: tl.constexpr, TILE: tl.constexpr, PINNED: tl.constexpr
):  # fmt: skip
    """Tiles of rows, or of heads of rows, in the scratch, and their first tiles that are left out of it."""
    flag = tl.load(flags + rows // KH, mask=rows < num_rows, other=0)
    tiles = (length + TILE - 1) // TILE
    left_out = tl.minimum(flag // (PINNED * TILE), tiles)
    return tiles - left_out, left_out


@triton.jit
def _apart(parts):
    """Numbers of pieces of cut rows and of whole rows."""
    return tl.where(parts > 1, parts, 0), tl.where(parts == 1, 1, 0)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_pieces", "spare", "max_tiles"])
def plan_pieces(  # noqa: PLR0915 - one kernel, in the order of what it does
    query_start_loc, seq_lens, flags, pieces, lane_rows, lane_offsets, num_slots, num_rows, num_pieces,
    spare, max_tiles,
    TILE: tl.constexpr, MIN_PIECE: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
    PINNED: tl.constexpr, KH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Each program writes the pieces of ROWS rows, or heads of rows. Each program counts all rows."""
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
        tiles, _ = _scratch_tiles(length, flags, at + lane, num_rows, KH, TILE, PINNED)
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
    tiles, left_out = _scratch_tiles(length, flags, row, num_rows, KH, TILE, PINNED)
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

    # Clears pieces of an earlier plan after the last piece.
    for at in range(
        num_cut + tl.sum(whole_in_all, 0) + mine, num_pieces, tl.num_programs(0) * ROWS
    ):
        tl.store(pieces + (at + lane) * FIELDS, -1, mask=at + lane < num_pieces)
