# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Scores of prompt chunks: column sums of the causal softmax, given each query's log-sum-exp.

The attention itself stays with vLLM's kernel, which knows the log-sum-exp of each query. With it a
probability needs no second pass: one program owns a tile of keys of one kv head, walks over the later queries
of all q heads of its group, and sums ``exp(logit - lse)``. Half of attention's operations (no P.V), causal
tiles only, each score written once by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.dot import dot
from h2o_vllm.kernels.triton.paged import load_keys, locate

__all__ = ["COMPUTE", "add_prompt_scores"]

_LOG2E = 1.4426950408889634
COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16}
"""What queries are multiplied in; all others in bfloat16, which holds every float8_e4m3fn exactly."""


def add_prompt_scores(
    query: Tensor,
    key_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    lse: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    rows: Tensor | None = None,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    scored_from: Tensor | None = None,
) -> None:
    """Add the probabilities that each key receives from its row's queries. Eager.

    The queries of a row are the last positions of its live sequence; there may be context before them
    (chunked prefill, prefix-cache hit). Rows with one query or length 0 are left alone.

    Args:
        query: [T, H, D]; may be strided along T.
        key_cache: [N, BS, KH, D], any strides with a last one of 1; dtype of ``query``, or float8_e4m3fn
            (then ``query`` may be as well; both are multiplied in 16 bits).
        scores: [N, KH, BS], float32, contiguous.
        block_table: [B, MB], int32, without holes. query_start_loc: [B + 1], int32.
        seq_lens: [B], int32, live lengths including the chunk.
        lse: [H, T], float32, any strides: natural log of the sum of exp(scaled logits) of each query.
        scale: factor on q.k before the softmax.
        max_query_len, max_seq_len: no row of this call has more; host numbers, they size the grid.
        rows: [R], int32: the rows to look at, each once; all if left out. Saves launching empty programs.
        query_scale, key_scale: see :func:`.decode.attend_decode`.
        scored_from: [B], int32: where in the batch each row's scored queries start, up to its last one; its
            first query if left out.
    """
    count = seq_lens.shape[0] if rows is None else rows.shape[0]
    if count == 0 or max_query_len < 2 or max_seq_len < 2:
        return
    _, block_size, kv_heads, size = key_cache.shape
    padded = max(16, triton.next_power_of_2(size))
    # Keys and queries per tile, warps: a tile of 128 x 128 sums is 64 registers of 256 threads, twice.
    # float32 has no tensor core and keeps its operands in registers as well: larger tiles would spill.
    tile, warps = (128, 8) if padded <= 128 else (64, 4)
    if query.dtype == torch.float32:
        tile, warps = 32, 4
    grid = (triton.cdiv(max_seq_len, tile), kv_heads, count)
    _add_prompt_scores[grid](
        query,
        key_cache,
        scores,
        block_table,
        query_start_loc,
        seq_lens,
        lse,
        rows,
        scored_from,
        query_scale,
        key_scale,
        scale * _LOG2E,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        block_table.stride(0),
        lse.stride(0),
        lse.stride(1),
        KH=kv_heads,
        G=query.shape[1] // kv_heads,
        COMPUTE=COMPUTE.get(query.dtype, tl.bfloat16),
        D=size,
        DP=padded,
        BS=block_size,
        KEYS=tile,
        QUERIES=tile,
        num_warps=warps,
        num_stages=2,
    )


@triton.jit
def _probabilities(
    queries, lse, k, at, count, stride_qt, stride_qh, stride_lh, stride_lt, scale_log2, dims, wide,
    G: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """exp(logit - lse) of QUERIES (token, q head) pairs, numbered token by token, for a tile of keys."""
    pair = at + tl.arange(0, QUERIES)
    real = pair < count
    token = pair // G
    head = pair % G
    q = tl.load(
        queries + (token.to(tl.int64) * stride_qt + head * stride_qh)[:, None] + dims[None, :],
        mask=real[:, None] & wide[None, :],
        other=0.0,
    )
    # A pair that is none: exp(0 - inf) = 0.
    sums = tl.load(lse + head * stride_lh + token * stride_lt, mask=real, other=float("inf"))
    logits = dot(q.to(k.dtype), k, tl.zeros([QUERIES, k.shape[1]], tl.float32)) * scale_log2
    return tl.exp2(logits - (sums * 1.4426950408889634)[:, None]), token


# Not specialised: strides that change with the batch would compile in the middle of serving.
@triton.jit(do_not_specialize=["stride_table", "stride_lh", "stride_lt"])
def _add_prompt_scores(
    query,
    key_cache,
    scores,
    block_table,
    query_start_loc,
    seq_lens,
    lse,
    rows,
    scored_from,
    query_scale,
    key_scale,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_table,
    stride_lh,
    stride_lt,
    KH: tl.constexpr,
    G: tl.constexpr,
    COMPUTE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """One tile of keys of one row and kv head."""
    row = tl.program_id(2)
    if rows is not None:
        row = tl.load(rows + row)
    kv_head = tl.program_id(1).to(tl.int64)
    first_key = tl.program_id(0) * KEYS
    length = tl.load(seq_lens + row)
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    if end - start < 2 or first_key >= length:
        return
    if scored_from is not None:
        start = tl.load(scored_from + row)
    tokens = end - start

    dims = tl.arange(0, DP)
    wide = dims < D
    position = first_key + tl.arange(0, KEYS)
    live = position < length
    block, slot = locate(block_table + row.to(tl.int64) * stride_table, position, live, BS)
    keys = key_cache + kv_head * stride_kh + dims[:, None]
    k = load_keys(keys, block, slot, stride_kn, stride_ks, wide, live, "").to(COMPUTE)
    if query_scale is not None:
        scale_log2 *= tl.load(query_scale)
    if key_scale is not None:
        scale_log2 *= tl.load(key_scale)
    queries = query + start.to(tl.int64) * stride_qt + kv_head * G * stride_qh
    sums = lse + start.to(tl.int64) * stride_lt + kv_head * G * stride_lh

    # Pairs before `seeing` see no key of the tile, those from `all_seeing` on see all of it.
    context = length - tokens
    count = tokens * G
    seeing = tl.maximum(first_key - context, 0) * G
    all_seeing = tl.maximum(first_key + KEYS - 1 - context, 0) * G
    all_seeing = seeing + (tl.maximum(all_seeing - seeing, 0) + QUERIES - 1) // QUERIES * QUERIES
    # Summed over queries at the end only: a sum across warps costs more than the additions.
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for at in range(seeing, tl.minimum(all_seeing, count), QUERIES):
        prob, token = _probabilities(
            queries, sums, k, at, count, stride_qt, stride_qh, stride_lh, stride_lt, scale_log2,
            dims, wide, G, QUERIES,
        )  # fmt: skip
        total += tl.where(position[None, :] <= (context + token)[:, None], prob, 0.0)
    for at in range(all_seeing, count, QUERIES):
        prob, _ = _probabilities(
            queries, sums, k, at, count, stride_qt, stride_qh, stride_lh, stride_lt, scale_log2,
            dims, wide, G, QUERIES,
        )  # fmt: skip
        total += prob
    target = scores + (block * KH + kv_head) * BS + slot
    tl.store(target, tl.load(target, mask=live) + tl.sum(total, 0), mask=live)
