# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Log-sum-exp of prompt queries, for an attention kernel that does not return it.

Only with vLLM's Triton backend: FlashAttention returns it. It takes half of attention's operations: no V.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.dot import add_sinks, cap_logits, cap_of, dot
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.paged import load_keys, locate
from h2o_vllm.kernels.triton.prompt import COMPUTE

__all__ = ["prompt_lse"]

_LOG2E = 1.4426950408889634


def prompt_lse(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    max_query_len: int,
    rows: Tensor,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Natural log of each query's softmax denominator, for the queries of some rows. Eager.

    The queries of a row are the last positions of its live sequence. Each sees the keys up to its own.

    Args:
        query: [T, H, D]; may be strided along T.
        key_cache: [N, BS, KH, D], any strides with a last one of 1. Its dtype is that of ``query``, or
            float8_e4m3fn (then ``query`` may have either; both are multiplied in 16 bits).
        block_table: [B, MB], int32, without holes. query_start_loc: [B + 1], int32.
        seq_lens: [B], int32, live lengths including the chunk.
        scale: factor on q.k before the softmax.
        out: [H, T], float32, any strides. Queries of other rows are not written.
        max_query_len: the most queries of a listed row; a host number, it sizes the grid.
        rows: [R], int32: the rows to process, each once.
        query_scale, key_scale: see :func:`.decode.attend_decode`.
        softcap, sinks: see :func:`.decode.attend_decode`.
    """
    if rows.shape[0] == 0:
        return
    shape, heads = key_cache.shape, query.shape[1]
    of_query, of_keys = query.stride(), key_cache.stride()
    form = (
        shape, of_keys, heads, of_query, key_cache.dtype, query.dtype, query_scale is None, key_scale is None,
        softcap == 0, None if sinks is None else sinks.dtype,
    )  # fmt: skip
    constants = _constants(shape, heads, query.dtype, capped=bool(softcap))
    tiles = triton.cdiv(max_query_len * constants["G"], constants["QUERIES"])
    given = (
        query, key_cache, block_table, query_start_loc, seq_lens, out, rows, query_scale, key_scale,
        scale * _LOG2E, cap_of(softcap), sinks, *of_query[:2], *of_keys[:3], block_table.stride(0),
        *out.stride(),
    )  # fmt: skip
    launch(_prompt_lse, (tiles, shape[2], rows.shape[0]), form, given, constants)


@cache
def _constants(
    caches: torch.Size, heads: int, dtype: torch.dtype, *, capped: bool
) -> dict[str, Any]:
    """Constants and options."""
    _, block_size, kv_heads, size = caches
    padded = max(16, triton.next_power_of_2(size))
    # Queries and keys per tile, as in prompt.py. Larger tiles of float32 would spill kilobytes per thread.
    tile, warps = (128, 8) if padded <= 128 else (64, 4)
    if dtype == torch.float32:
        tile, warps = 32, 8 if capped else 4
    return {
        "G": heads // kv_heads, "AS": COMPUTE.get(dtype, tl.bfloat16), "D": size, "DP": padded,
        "BS": block_size, "KEYS": tile, "QUERIES": tile, "num_warps": warps, "num_stages": 2,
    }  # fmt: skip


@triton.jit(do_not_specialize=["stride_table", "stride_oh", "stride_ot"])
def _prompt_lse(
    query,
    key_cache,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    rows,
    query_scale,
    key_scale,
    scale_log2,
    cap,
    sinks,
    stride_qt,
    stride_qh,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_table,
    stride_oh,
    stride_ot,
    G: tl.constexpr,
    AS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """One tile of (token, q head) pairs of one row and KV head, numbered token by token."""
    row = tl.load(rows + tl.program_id(2))
    kv_head = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_loc + row)
    tokens = tl.load(query_start_loc + row + 1) - start
    first = tl.program_id(0) * QUERIES
    if first >= tokens * G:
        return
    length = tl.load(seq_lens + row)
    pair = first + tl.arange(0, QUERIES)
    real = pair < tokens * G
    token = pair // G
    head = pair % G
    dims = tl.arange(0, DP)
    wide = dims < D
    at = (start + token).to(tl.int64) * stride_qt + (kv_head * G + head) * stride_qh
    q = tl.load(query + at[:, None] + dims[None, :], mask=real[:, None] & wide[None, :], other=0.0)
    q = q.to(AS)
    if query_scale is not None:
        scale_log2 *= tl.load(query_scale)
    if key_scale is not None:
        scale_log2 *= tl.load(key_scale)
    position = length - tokens + token
    # A padded pair sees the first key, so that no value is infinite.
    position = tl.where(real, position, 0)
    last = tl.minimum(first + QUERIES, tokens * G) - 1
    seen = length - tokens + last // G + 1

    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    table = block_table + row.to(tl.int64) * stride_table
    keys = key_cache + kv_head * stride_kh + dims[:, None]
    for first_key in range(0, seen, KEYS):
        key = first_key + tl.arange(0, KEYS)
        live = key < seen
        block, slot = locate(table, key, live, BS)
        k = load_keys(keys, block * stride_kn + slot * stride_ks, wide, live, "")
        logits = dot(q, k.to(AS), tl.zeros([QUERIES, KEYS], tl.float32)) * scale_log2
        logits = cap_logits(logits, cap)
        # Each pair sees a key of the first tile: from then on the maximum is finite.
        logits = tl.where(key[None, :] <= position[:, None], logits, float("-inf"))
        higher = tl.maximum(maximum, tl.max(logits, 1))
        total = total * tl.exp2(maximum - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
        maximum = higher
    total = add_sinks(total, maximum, sinks, kv_head * G + head, real)
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(
        out + (kv_head * G + head) * stride_oh + (start + token).to(tl.int64) * stride_ot,
        lse,
        mask=real,
    )
