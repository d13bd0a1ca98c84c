# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Attention, or its log-sum-exp alone, of rows with several queries.

Attention is for rows whose KV heads share slots: vLLM's kernels assume that a head owns its lane of each
block. It serves later chunks of bounded prompts, and preempted requests that compute their answers again.
The log-sum-exp alone is for an attention kernel that does not return it, which is vLLM's Triton backend. It
takes half of attention's operations: no V.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.batch import LayerBatch
from h2o_vllm.kernels.triton.dot import LOG2E, add_sinks, cap_logits, cap_of, dot
from h2o_vllm.kernels.triton.lanes import LANES, length_of, locate_token
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.paged import form_of, load_keys
from h2o_vllm.kernels.triton.prompt import COMPUTE


def attend_prompts(
    batch: LayerBatch, rows: Tensor, max_query_len: int, lse: Tensor, out: Tensor | None = None
) -> None:
    """Causal attention of the queries of some rows. Eager.

    Args:
        rows: [R], int32: the rows to process, each once. Of other rows nothing is written.
        max_query_len: the most queries of a listed row; a host number, it sizes the grid.
        lse: [H, T], float32, any strides: natural logs of the softmax denominators.
        out: [T, H, D], may be strided along T; ``None``: log-sum-exps alone.
    """
    if rows.shape[0] == 0:
        return
    query, keys = batch.query, batch.key_cache
    shape, heads = keys.shape, query.shape[1]
    if out is None:
        values, value_scale = None, None
        strides: tuple[int | None, ...] = (None,) * 5
        constants = _lse_constants(shape, heads, query.dtype, capped=bool(batch.softcap))
    else:
        values, value_scale = batch.value_cache, batch.value_scale
        strides = (*values.stride()[:3], *out.stride()[:2])
        constants = _constants(shape, heads, query.dtype)
    form = (*form_of(batch), *strides, None if out is None else out.dtype)
    tiles = triton.cdiv(max_query_len * constants["G"], constants["QUERIES"])
    given = (
        query, keys, values, batch.block_table, batch.query_start_loc, batch.seq_lens, out, lse, rows,
        batch.query_scale, batch.key_scale, value_scale, batch.scale * LOG2E, cap_of(batch.softcap),
        batch.sinks, *query.stride()[:2], *keys.stride()[:3], *strides[:3], batch.block_table.stride(0),
        *strides[3:], *lse.stride(), *batch.layer_lanes,
    )  # fmt: skip
    launch(_attend_prompts, (tiles, shape[2], rows.shape[0]), form, given, constants)


@cache
def _constants(caches: torch.Size, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants and options of attention."""
    # Queries per tile. More keys per tile would spill on Ampere. float32 keeps its operands in registers.
    wide = caches[3] > 128
    tile, warps = (16, 8) if dtype == torch.float32 else (32 if wide else 64, 4)
    return _of_tile(caches, heads, dtype, tile, 32, warps)


@cache
def _lse_constants(
    caches: torch.Size, heads: int, dtype: torch.dtype, *, capped: bool
) -> dict[str, Any]:
    """The same of log-sum-exps alone."""
    # Queries and keys per tile, as in prompt.py. Larger tiles of float32 would spill kilobytes per thread.
    tile, warps = (64, 4) if caches[3] > 128 else (128, 8)
    if dtype == torch.float32:
        tile, warps = 32, 8 if capped else 4
    return _of_tile(caches, heads, dtype, tile, tile, warps)


def _of_tile(
    caches: torch.Size, heads: int, dtype: torch.dtype, queries: int, keys: int, warps: int
) -> dict[str, Any]:
    _, block_size, kv_heads, size = caches
    return {
        "KH": kv_heads, "G": heads // kv_heads, "AS": COMPUTE.get(dtype, tl.bfloat16), "D": size,
        "DP": max(16, triton.next_power_of_2(size)), "BS": block_size, "KEYS": keys, "QUERIES": queries,
        "num_warps": warps, "num_stages": 2,
    }  # fmt: skip


@triton.jit(do_not_specialize=["stride_table", "stride_lh", "stride_lt", *LANES])
def _attend_prompts(  # noqa: PLR0915 - one kernel, in the order of what it does
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, lse, rows, query_scale,
    key_scale, value_scale, scale_log2, cap, sinks, stride_qt, stride_qh, stride_kn, stride_ks, stride_kh,
    stride_vn, stride_vs, stride_vh, stride_table, stride_ot, stride_oh, stride_lh, stride_lt, lane_rows,
    lane_offsets, lane_pages, layer, num_slots, num_blocks,
    KH: tl.constexpr, G: tl.constexpr, AS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One tile of (token, q head) pairs of one row and KV head, numbered token by token."""
    row = tl.load(rows + tl.program_id(2))
    kv_head = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_loc + row)
    tokens = tl.load(query_start_loc + row + 1) - start
    first_pair = tl.program_id(0) * QUERIES
    if first_pair >= tokens * G:
        return
    length = tl.load(seq_lens + row)
    length, pinned, heavy, first, count = length_of(
        lane_rows, lane_offsets, layer, num_slots, row, kv_head, length, KH, BS
    )
    pair = first_pair + tl.arange(0, QUERIES)
    real = pair < tokens * G
    token = pair // G
    head = kv_head * G + pair % G
    dims = tl.arange(0, DP)
    wide = dims < D
    both = real[:, None] & wide[None, :]
    at = (start + token).to(tl.int64)
    q_at = query + (at * stride_qt + head * stride_qh)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=both, other=0.0).to(AS)
    if query_scale is not None:
        scale_log2 *= tl.load(query_scale)
    if key_scale is not None:
        scale_log2 *= tl.load(key_scale)
    # A padded pair sees the first key, so that no value is infinite.
    position = tl.where(real, length - tokens + token, 0)
    last = tl.minimum(first_pair + QUERIES, tokens * G) - 1
    seen = length - tokens + last // G + 1

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if value_cache is not None:
        acc = tl.zeros([QUERIES, DP], tl.float32)
    table = block_table + row.to(tl.int64) * stride_table
    for first_key in range(0, seen, KEYS):
        key = first_key + tl.arange(0, KEYS)
        live = key < seen
        block, lane, slot = locate_token(
            table, lane_rows, lane_pages, layer, num_blocks, key, live, kv_head, pinned, heavy, first, count,
            KH, BS,
        )  # fmt: skip
        at_key = block * stride_kn + lane * stride_kh + slot * stride_ks
        k = load_keys(key_cache + dims[:, None], at_key, wide, live)
        logits = dot(q, k.to(AS), tl.zeros([QUERIES, KEYS], tl.float32)) * scale_log2
        logits = cap_logits(logits, cap)
        # Each pair sees a key of the first tile: from then on the maximum is finite.
        logits = tl.where(key[None, :] <= position[:, None], logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        prob = tl.exp2(logits - highest[:, None])
        shrink = tl.exp2(top - highest)
        if value_cache is not None:
            at_value = block * stride_vn + lane * stride_vh + slot * stride_vs
            v = tl.load(
                value_cache + at_value[:, None] + dims[None, :],
                mask=live[:, None] & wide[None, :],
                other=0.0,
            )
            acc = dot(prob.to(AS), v.to(AS), acc * shrink[:, None])
        total = total * shrink + tl.sum(prob, 1)
        top = highest
    total = add_sinks(total, top, sinks, head, real)
    if value_cache is not None:
        if value_scale is not None:
            acc *= tl.load(value_scale)
        target = out + (at * stride_ot + head * stride_oh)[:, None] + dims[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=both)
    sums = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + head * stride_lh + at * stride_lt, sums, mask=real)
