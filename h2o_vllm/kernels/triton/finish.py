# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The second launch of :mod:`.decode`: joins pieces to rows, and turns the scratch into scores."""

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.lanes import locate_listed
from h2o_vllm.kernels.triton.paged import locate
from h2o_vllm.kernels.triton.plan import cut_pieces, fits, load_piece, of_head

OF_LAYER = ["layer", "stride_keys", "stride_pieces"]
"""Arguments that select a layer's lists and plan. Not specialised: new values compile nothing."""


@triton.jit
def scratch_of(kv_head, num_tiles, lane_keys, KH: tl.constexpr, TILE: tl.constexpr):
    """Start of a KV head's part of the scratch, in heads, and the distance of its q heads, in keys.

    With lanes the tiles of all heads are numbered together, and no head has a part of its own.
    """
    columns = num_tiles.to(tl.int64) * TILE
    if lane_keys is not None:
        kv_head *= 0
        columns *= KH
    return kv_head, columns


@triton.jit
def row_totals(
    part_max, part_sum, first, count, kv_head,
    H: tl.constexpr, G: tl.constexpr, GS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A row's maximum and the inverse of its sum, per q head, from its ``count`` pieces; [GS] each."""
    heads = tl.arange(0, GS)
    real = heads < G
    parts = tl.arange(0, PARTS)
    top = tl.full([GS], float("-inf"), tl.float32)
    total = tl.zeros([GS], tl.float32)
    for at in range(first, first + count, PARTS):
        inside = (at + parts < first + count)[:, None] & real[None, :]
        part = (at + parts).to(tl.int64)[:, None] * H + kv_head * G + heads[None, :]
        tops = tl.load(part_max + part, mask=inside, other=float("-inf"))
        sums = tl.load(part_sum + part, mask=inside, other=0.0)
        # Padded heads would compute inf - inf.
        highest = tl.where(real, tl.maximum(top, tl.max(tops, 0)), 0.0)
        total = total * tl.exp2(top - highest) + tl.sum(sums * tl.exp2(tops - highest[None, :]), 0)
        top = highest
    return top, tl.where(real, 1.0 / tl.where(real, total, 1.0), 0.0)


@triton.jit
def _page_of(table, lane_keys, pinned, position, live, kv_head, KH: tl.constexpr, BS: tl.constexpr):
    """Pages of the positions of one kv head, 64 bits."""
    if lane_keys is None:
        block, _ = locate(table, position, live, BS)
        page = block * KH + kv_head
    else:
        page = locate_listed(table, lane_keys, position, live, kv_head, pinned, KH, BS).to(tl.int64)
    return page


@triton.jit
def add_scores(
    scores, probs, tile_max, table, lane_keys, pinned, kv_head, start, end, base, scored_from, top, weight,
    num_tiles,
    KH: tl.constexpr, G: tl.constexpr, GS: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Add the probabilities of a piece's keys to their scores, if the row fits the scratch."""
    if fits(base):
        start = tl.multiple_of(tl.maximum(start, scored_from), TILE)
        heads = tl.arange(0, GS)
        real = heads < G
        offsets = tl.arange(0, SPAN)
        own, columns = scratch_of(kv_head, num_tiles, lane_keys, KH, TILE)
        my_probs = probs + (own * G + heads)[:, None] * columns + base * TILE + offsets[None, :]
        my_max = tile_max + (own * num_tiles + base) * G + heads[:, None]
        first = start + offsets
        page = _page_of(table, lane_keys, pinned, first, first < end, kv_head, KH, BS)
        for at in range(start, end, SPAN):
            position = at + offsets
            live = position < end
            target = scores + page * BS + position % BS
            # All loads of a step, and the next step's block ids, are issued together: the compiler moves no
            # load across a store, which may write anywhere.
            score = tl.load(target, mask=live)
            ahead = position + SPAN
            page = _page_of(table, lane_keys, pinned, ahead, ahead < end, kv_head, KH, BS)
            # Not masked by `live`, so that loads are wide. Values after the end are not stored.
            prob = tl.load(my_probs + at, mask=real[:, None], other=0.0).to(tl.float32)
            tops = tl.load(my_max + (position // TILE)[None, :] * G, mask=real[:, None], other=0.0)
            share = prob * tl.exp2(tops - top[:, None]) * weight[:, None]
            tl.store(target, score + tl.sum(share, 0), mask=live)


@triton.jit(do_not_specialize=["stride_table", "num_tiles", *OF_LAYER])
def finish(
    scores, block_table, out, pieces, part_out, part_max, part_sum, probs, tile_max, stride_table,
    stride_ot, stride_oh, num_tiles, lane_keys, layer, stride_keys, stride_pieces,
    H: tl.constexpr, KH: tl.constexpr, G: tl.constexpr, GS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The scores of the keys of some pieces of split rows, and a part of these rows' outputs."""
    # With lanes a piece belongs to one KV head; else all KV heads have the same pieces.
    SHARED_BY: tl.constexpr = KH if lane_keys is None else 1
    PARTS_APART: tl.constexpr = H if lane_keys is None else G
    if lane_keys is not None:
        pieces += layer * stride_pieces
    kv_head = (tl.program_id(0) % SHARED_BY).to(tl.int64)
    for item in range(
        tl.program_id(0) // SHARED_BY, cut_pieces(pieces), tl.num_programs(0) // SHARED_BY
    ):
        words = pieces + item * FIELDS
        row = tl.load(words)
        token, start, end, base, first, count, scored_from = load_piece(words, TILE)
        pinned, listed = 0, lane_keys
        if lane_keys is not None:
            kv_head, pinned, listed = of_head(words, lane_keys, layer, stride_keys)
            base = base.to(tl.int64)
        own, _ = scratch_of(kv_head, num_tiles, lane_keys, KH, TILE)
        top, weight = row_totals(part_max, part_sum, first, count, own, PARTS_APART, G, GS, PARTS)
        table = block_table + row.to(tl.int64) * stride_table
        add_scores(
            scores, probs, tile_max, table, listed, pinned, kv_head, start, end, base, scored_from, top,
            weight, num_tiles, KH, G, GS, BS, TILE, SPAN,
        )  # fmt: skip

        heads = tl.arange(0, GS)
        parts = tl.arange(0, PARTS)
        dims = tl.arange(0, DP)
        wide = dims < D
        # The pieces of a row divide its q heads among them.
        for head in range(item - first, G, count):
            head_top = tl.sum(tl.where(heads == head, top, 0.0), 0)
            head_weight = tl.sum(tl.where(heads == head, weight, 0.0), 0)
            acc = tl.zeros([DP], tl.float32)
            for at in range(first, first + count, PARTS):
                inside = at + parts < first + count
                part = (at + parts).to(tl.int64) * PARTS_APART + own * G + head
                tops = tl.load(part_max + part, mask=inside, other=float("-inf"))
                partial = tl.load(
                    part_out + part[:, None] * D + dims[None, :],
                    mask=inside[:, None] & wide[None, :],
                    other=0.0,
                )
                acc += tl.sum(partial * tl.exp2(tops - head_top)[:, None], 0)
            target = out + token * stride_ot + (kv_head * G + head) * stride_oh + dims
            tl.store(target, (acc * head_weight).to(out.dtype.element_ty), mask=wide)
