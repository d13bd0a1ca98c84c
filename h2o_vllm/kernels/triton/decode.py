# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Decode attention over paged KV that also adds each key's probability to the scores.

A probability needs its query's normaliser, which is known only after all keys are read. Reading K a second
time would cost half the attention again. So the program that reads a piece of K and V writes
``exp(logit - running maximum)`` of each key and q head, and the maximum of each tile, to a scratch that all
layers share. If the piece is a whole row, the program then computes the scores from its scratch itself, while
other programs use the memory. A second launch finishes rows of several pieces (:mod:`.finish`).

Bytes per live key and kv head, 16-bit cache:

    K and V              4 * D         512 at D = 128, what stock attention reads
    scores               4 + 4         read and written
    scratch              2 * G + 2 * G written and read; at G = 4 it is 16 bytes

At G = 4 and D = 128 that is 1.6 % more than stock while the scratch of one layer stays in the L2 cache, and
4.7 % if none of it does. (Logits in float32 would take 7.8 %.) Cache hints for K and V have no effect: they
are loaded by asynchronous copies, from which Triton 3.7 drops such hints. The scratch is float16: it holds
numbers in [0, 1] to 2^-11, finer than the 16-bit q and k that they come from.

All q heads of a group share each loaded tile: one tensor-core product of [16, D] with [D, tile].
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.batch import LayerBatch
from h2o_vllm.kernels.triton.dot import LOG2E, add_sinks, cap_logits, cap_of, dot
from h2o_vllm.kernels.triton.finish import OF_LAYER, add_scores, finish, row_totals, scratch_of
from h2o_vllm.kernels.triton.lanes import locate_listed
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.paged import form_of, load_keys, locate
from h2o_vllm.kernels.triton.plan import fits, load_piece, of_head
from h2o_vllm.kernels.triton.workspace import SPAN, DecodeWorkspace


def attend_decode(
    batch: LayerBatch, out: Tensor, workspace: DecodeWorkspace, *, cut: bool = True
) -> None:
    """Attention of the planned rows' single queries. Adds their probabilities to ``batch.scores``.

    The last call of :meth:`.DecodeWorkspace.plan` sets the rows and their lengths. Output and scores of all
    other rows do not change. A CUDA graph may capture it: the grid depends on B alone.

    Args:
        batch: with ``lanes`` exactly if the plan was made with them; 8-bit tensors are multiplied in
            ``out``'s dtype.
        out: [T, H, D]; only the planned rows' tokens are written. May be strided along T.
        cut: whether the plan may cut any row, see :meth:`.DecodeWorkspace.cuts`.
    """
    query, keys, values, lanes = batch.query, batch.key_cache, batch.value_cache, batch.lanes
    shape, heads = keys.shape, query.shape[1]
    planned = workspace.pieces
    told: tuple[Tensor | int | None, ...] = (None, None, None, None)
    if lanes is not None:
        assert workspace.head_pieces is not None
        planned = workspace.head_pieces
        told = (lanes.keys, batch.layer, lanes.keys.stride(0), planned.stride(0))
    handed_over = (
        planned, workspace.part_out, workspace.part_max, workspace.part_sum, workspace.probs,
        workspace.tile_max,
    )  # fmt: skip
    strides = (
        batch.block_table.stride(0), out.stride(0), out.stride(1), workspace.tile_max.shape[1],
    )  # fmt: skip
    form = (*form_of(batch), out.dtype, strides[1:3], workspace.tile, workspace.probs.dtype)
    attends, finishes = _constants(shape, heads, workspace.tile, planned.shape[-1], keys.dtype)
    grid = ((batch.block_table.shape[0] + workspace.spare) * shape[2],)
    given: tuple[Any, ...] = (
        query, keys, values, batch.block_table, out, *handed_over, batch.scores, batch.query_scale,
        batch.key_scale, batch.value_scale, batch.scale * LOG2E, cap_of(batch.softcap), batch.sinks,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *strides, *told,
    )  # fmt: skip
    launch(_attend, grid, form, given, attends)
    if not cut:
        return
    # At most two programs per piece: rows longer than C have less than 2 * total / C pieces.
    grid = (workspace.spare * shape[2],)
    given = (batch.scores, batch.block_table, out, *handed_over, *strides, *told)
    launch(finish, grid, form, given, finishes)


@cache
def _constants(
    caches: torch.Size, heads: int, tile: int, fields: int, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options of both launches."""
    _, block_size, kv_heads, size = caches
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(size))
    sizes = {
        "H": heads, "KH": kv_heads, "G": group, "GS": triton.next_power_of_2(group), "D": size,
        "DP": padded, "BS": block_size, "TILE": tile, "SPAN": SPAN, "FIELDS": fields,
    }  # fmt: skip
    attends = {
        **sizes,
        "GP": max(16, triton.next_power_of_2(group)),
        # float32 uses no tensor core and keeps its operands in registers: more threads share them.
        "num_warps": 8 if dtype.itemsize == 4 else 4,
        # Triton divides stages - 1 buffers between block ids and the keys and values loaded by them. Five
        # stages give keys and values two buffers each: a program loads one tile while it computes another.
        "num_stages": 5 if 2 * tile * padded * dtype.itemsize <= 32 << 10 else 3,
    }
    return attends, {**sizes, "PARTS": 16, "num_warps": 4}


# Not specialised: arguments that depend on a caller's buffers. A new value would compile while serving.
@triton.jit(do_not_specialize=["stride_table", "num_tiles", *OF_LAYER])
def _attend(  # noqa: PLR0915 - one kernel; what others do as well is in functions
    query, key_cache, value_cache, block_table, out, pieces, part_out, part_max, part_sum, probs, tile_max,
    scores, query_scale, key_scale, value_scale, scale_log2, cap, sinks, stride_qt, stride_qh, stride_kn,
    stride_ks, stride_kh, stride_vn, stride_vs, stride_vh, stride_table, stride_ot, stride_oh, num_tiles,
    lane_keys, layer, stride_keys, stride_pieces,
    H: tl.constexpr, KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One piece of one row and KV head: attention, and the scratch of its keys; scores of a whole row."""
    # Heads of one piece are adjacent programs: they read adjacent memory at the same time. With lanes each
    # head has pieces of its own.
    SHARED_BY: tl.constexpr = KH if lane_keys is None else 1
    PARTS_APART: tl.constexpr = H if lane_keys is None else G
    item = (tl.program_id(0) // SHARED_BY).to(tl.int64)
    kv_head = (tl.program_id(0) % SHARED_BY).to(tl.int64)
    if lane_keys is not None:
        pieces += layer * stride_pieces
    words = pieces + item * FIELDS
    row = tl.load(words)
    if row < 0:
        return
    token, start, end, base, first, count, scored_from = load_piece(words, TILE)
    pinned = 0
    if lane_keys is not None:
        kv_head, pinned, lane_keys = of_head(words, lane_keys, layer, stride_keys)
        base = base.to(tl.int64)

    heads = tl.arange(0, GP)
    dims = tl.arange(0, DP)
    lanes = tl.arange(0, TILE)
    real = heads < G
    wide = dims < D
    q = tl.load(
        query + token * stride_qt + (kv_head * G + heads)[:, None] * stride_qh + dims[None, :],
        mask=real[:, None] & wide[None, :],
        other=0.0,
    )
    q = q.to(out.dtype.element_ty)
    if query_scale is not None:
        scale_log2 *= tl.load(query_scale)
    if key_scale is not None:
        scale_log2 *= tl.load(key_scale)
    table = block_table + row.to(tl.int64) * stride_table
    keys = key_cache + dims[:, None]
    values = value_cache + dims[None, :]
    if lane_keys is None:
        keys += kv_head * stride_kh
        values += kv_head * stride_vh
    own, columns = scratch_of(kv_head, num_tiles, lane_keys, KH, TILE)
    my_probs = probs + (own * G + heads)[:, None] * columns + base * TILE + lanes[None, :]
    my_max = tile_max + (own * num_tiles + base) * G + heads
    scored_from = tl.where(fits(base), scored_from, end)

    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for at in range(start, end, TILE):
        position = at + lanes
        live = position < end
        if lane_keys is None:
            block, slot = locate(table, position, live, BS)
            at_key = block * stride_kn + slot * stride_ks
            at_value = block * stride_vn + slot * stride_vs
        else:
            page = locate_listed(table, lane_keys, position, live, kv_head, pinned, KH, BS)
            block, lane, slot = (page // KH).to(tl.int64), page % KH, position % BS
            at_key = block * stride_kn + lane * stride_kh + slot * stride_ks
            at_value = block * stride_vn + lane * stride_vh + slot * stride_vs
        k = load_keys(keys, at_key, wide, live)
        logits = dot(q, k.to(q.dtype), tl.zeros([GP, TILE], tl.float32)) * scale_log2
        logits = cap_logits(logits, cap)
        logits = tl.where(live[None, :], logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        prob = tl.exp2(logits - highest[:, None])
        keep = heads < tl.where(at >= scored_from, G, 0)
        # Stores whole tiles, without a mask along the keys; zeros after the end.
        tl.store(my_probs + at, prob.to(probs.dtype.element_ty), mask=keep[:, None])
        tl.store(my_max + (at // TILE) * G, highest, mask=keep)
        v = tl.load(
            values + at_value[:, None],
            mask=live[:, None] & wide[None, :],
            other=0.0,
        )
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(prob, 1)
        acc = dot(prob.to(q.dtype), v.to(q.dtype), acc * shrink[:, None])
        top = highest
    if value_scale is not None:
        acc *= tl.load(value_scale)
    # Once per row, with its first piece.
    has_sinks = heads < tl.where(item == first, G, 0)
    total = add_sinks(total, top, sinks, kv_head * G + heads, has_sinks)

    part = item * PARTS_APART + own * G + heads
    tl.store(part_max + part, top, mask=real)
    tl.store(part_sum + part, total, mask=real)
    both = real[:, None] & wide[None, :]
    if count == 1:
        # The output comes first: that frees its registers for the scores.
        target = out + token * stride_ot + (kv_head * G + heads)[:, None] * stride_oh
        result = acc / total[:, None]
        tl.store(target + dims[None, :], result.to(out.dtype.element_ty), mask=both)
        # This program had the whole row: after a barrier it may read what it has written.
        tl.debug_barrier()
        highest, weight = row_totals(part_max, part_sum, item, 1, own, PARTS_APART, G, GS, 1)
        add_scores(
            scores, probs, tile_max, table, lane_keys, pinned, kv_head, start, end, base, scored_from,
            highest, weight, num_tiles, KH, G, GS, BS, TILE, SPAN,
        )  # fmt: skip
    else:
        tl.store(part_out + part[:, None] * D + dims[None, :], acc, mask=both)
