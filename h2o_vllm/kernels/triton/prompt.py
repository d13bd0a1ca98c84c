# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Scores of prompt chunks: column sums of the causal softmax, from each query's log-sum-exp.

vLLM's kernel computes the attention and the log-sum-exp (LSE) of each query. With the LSE a probability needs
only one pass. One program has a tile of keys of one KV head and a segment of a row's queries
(:mod:`.segments`). For all q heads of its group it sums ``exp(logit - lse)`` over these queries. That takes
half of attention's operations (no P.V), over causal tiles only. One program writes each sum, once.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.batch import LayerBatch
from h2o_vllm.kernels.triton.dot import LOG2E, cap_logits, cap_of, dot
from h2o_vllm.kernels.triton.lanes import LANES, length_of, locate_token
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.paged import form_of, load_keys
from h2o_vllm.kernels.triton.partial_sums import SUMMED_KEYS, add_partial_sums
from h2o_vllm.kernels.triton.segments import FIELDS, PromptSegments

COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16}
"""Dtypes in which queries are multiplied. Others become bfloat16, which holds float8_e4m3fn exactly."""


def add_prompt_scores(batch: LayerBatch, lse: Tensor, prompts: PromptSegments) -> None:
    """Add the probabilities that each key receives from its row's queries. Eager.

    Args:
        lse: [H, T], float32, any strides: natural log of each query's softmax denominator, with sinks.
        prompts: the scored queries and their segments.
    """
    query, keys, scores = batch.query, batch.key_cache, batch.scores
    shape, heads = keys.shape, query.shape[1]
    _, block_size, kv_heads, _ = shape
    shared = batch.layer_lanes
    # Always a tensor: ``None`` would compile another kernel.
    partial = scores if prompts.partial is None else prompts.partial
    constants, sums_constants = _constants(shape, heads, query.dtype, capped=bool(batch.softcap))
    rows, stride_table = (
        (batch.block_table, batch.query_start_loc, batch.seq_lens),
        batch.block_table.stride(0),
    )
    form = form_of(batch)
    for begin, end, sums in prompts.launches:
        segments = prompts.segments if len(prompts.launches) == 1 else prompts.segments[begin:end]
        grid = (-(-prompts.max_keys // constants["KEYS"]), kv_heads, end - begin)
        given = (
            query, keys, scores, partial, *rows, lse, segments, batch.query_scale, batch.key_scale,
            batch.scale * LOG2E, cap_of(batch.softcap), *query.stride()[:2], *keys.stride()[:3], stride_table,
            *lse.stride(), *shared,
        )  # fmt: skip
        launch(_add_prompt_scores, grid, form, given, constants)
        if sums:
            grid = (-(-prompts.max_keys // SUMMED_KEYS), kv_heads, end - begin)
            given = (
                scores,
                partial,
                batch.block_table,
                batch.seq_lens,
                segments,
                stride_table,
                *shared,
            )
            of_sums = (kv_heads, block_size, batch.lanes is None)
            launch(add_partial_sums, grid, of_sums, given, sums_constants)


@cache
def _constants(
    caches: torch.Size, heads: int, dtype: torch.dtype, *, capped: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of both launches."""
    _, block_size, kv_heads, size = caches
    padded = max(16, triton.next_power_of_2(size))
    queries, keys, warps, stages = _tile(dtype, padded, capped=capped)
    both = {"KH": kv_heads, "BS": block_size, "FIELDS": FIELDS}
    scores = {
        **both, "G": heads // kv_heads, "COMPUTE": COMPUTE.get(dtype, tl.bfloat16), "D": size, "DP": padded,
        "KEYS": keys, "QUERIES": queries, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return scores, {**both, "KEYS": SUMMED_KEYS, "UNROLLED": 8, "num_warps": 4}


def _tile(dtype: torch.dtype, padded: int, *, capped: bool) -> tuple[int, int, int, int]:
    """Queries and keys per tile, warps, stages."""
    if dtype == torch.float32:
        # No tensor core: the operands are in registers, so larger tiles would spill.
        return 32, 32, 8 if capped else 4, 2
    # The soft cap needs more registers: tiles of 128 keys would spill.
    return (64, 128, 4, 2) if padded <= 128 and not capped else (64, 64, 4, 2)


@triton.jit
def _log_probabilities(
    query, q_rows, lse, lse_rows, k, ahead, left, scale_log2, cap, wide, TOKENS: tl.constexpr
):  # fmt: skip
    """Log2 of exp(logit - lse) for tiles of keys and of queries, of which ``left`` tokens are real."""
    real = ahead < tl.minimum(left, TOKENS)
    q = tl.load(query + q_rows, mask=real[:, None] & wide[None, :], other=0.0)
    # Padded rows compute 0 - inf.
    sums = tl.load(lse + lse_rows, mask=real, other=float("inf"))
    logits = dot(q.to(k.dtype), k, tl.zeros([q_rows.shape[0], k.shape[1]], tl.float32)) * scale_log2
    return cap_logits(logits, cap) - (sums * 1.4426950408889634)[:, None]


@triton.jit
def _joined(total, log, visible):
    """Add the probabilities of a tile of queries to the sums, for the ``visible`` keys."""
    prob = tl.exp2(log)
    if visible is not None:
        # After the exponential: before it, the mask takes more instructions.
        prob = tl.where(visible, prob, 0.0)
    return total + prob


# Not specialised: strides that change with the batch. New values would compile while serving.
@triton.jit(do_not_specialize=["stride_table", "stride_lh", "stride_lt", *LANES])
def _add_prompt_scores(  # noqa: PLR0915 - one kernel; what others do as well is in functions
    query, key_cache, scores, partial, block_table, query_start_loc, seq_lens, lse, segments, query_scale,
    key_scale, scale_log2, cap, stride_qt, stride_qh, stride_kn, stride_ks, stride_kh, stride_table,
    stride_lh, stride_lt, lane_rows, lane_offsets, lane_pages, layer, num_slots, num_blocks,
    KH: tl.constexpr, G: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one KV head, and the queries of one segment."""
    words = segments + tl.program_id(2) * FIELDS
    row = tl.load(words)
    start = tl.load(words + 1)
    tokens = tl.load(words + 2) - start
    offset = tl.load(words + 3)
    kv_head = tl.program_id(1).to(tl.int64)
    first_key = tl.program_id(0) * KEYS
    length = tl.load(seq_lens + row)
    length, pinned, heavy, first, count = length_of(
        lane_rows, lane_offsets, layer, num_slots, row, kv_head, length, KH, BS
    )
    if first_key >= length:
        return
    # Live keys before the segment's first query, and live keys that its last query sees.
    context = length - tl.load(query_start_loc + row + 1) + start
    seen = context + tokens
    position = first_key + tl.arange(0, KEYS)
    target = partial + offset + kv_head * tl.load(words + 4) + position
    if first_key >= seen:
        if offset >= 0:
            tl.store(target, tl.zeros([KEYS], tl.float32))
        return

    dims = tl.arange(0, DP)
    wide = dims < D
    live = position < seen
    table = block_table + row.to(tl.int64) * stride_table
    block, lane, slot = locate_token(
        table, lane_rows, lane_pages, layer, num_blocks, position, live, kv_head, pinned, heavy, first,
        count, KH, BS,
    )  # fmt: skip
    at_key = block * stride_kn + lane * stride_kh + slot * stride_ks
    k = load_keys(key_cache + dims[:, None], at_key, wide, live).to(COMPUTE)
    if query_scale is not None:
        scale_log2 *= tl.load(query_scale)
    if key_scale is not None:
        scale_log2 *= tl.load(key_scale)
    # A tile's rows are the q heads of whole tokens, so all tiles have the same layout.
    TOKENS: tl.constexpr = QUERIES // G
    ahead = tl.arange(0, QUERIES) // G
    head = tl.arange(0, QUERIES) % G
    q_rows = (ahead * stride_qt + head * stride_qh)[:, None] + dims[None, :]
    lse_rows = ahead * stride_lt + head * stride_lh
    # In 64 bits, so that their products have 64 bits.
    stride_qt, stride_lt = stride_qt.to(tl.int64), stride_lt.to(tl.int64)
    query += start * stride_qt + kv_head * G * stride_qh
    lse += start * stride_lt + kv_head * G * stride_lh

    # Tokens before `seeing` see no key of the tile; tokens from `all_seeing` on see all of its keys.
    seeing = tl.maximum(first_key - context, 0)
    all_seeing = tl.maximum(first_key + KEYS - 1 - context, 0)
    all_seeing = seeing + (tl.maximum(all_seeing - seeing, 0) + TOKENS - 1) // TOKENS * TOKENS
    # Reduced over queries only at the end: a sum across warps costs more than the additions.
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for at in range(seeing, tl.minimum(all_seeing, tokens), TOKENS):
        log = _log_probabilities(
            query + at * stride_qt, q_rows, lse + at * stride_lt, lse_rows, k, ahead, tokens - at,
            scale_log2, cap, wide, TOKENS,
        )  # fmt: skip
        visible = position[None, :] <= (context + at + ahead)[:, None]
        total = _joined(total, log, visible)
    for at in range(all_seeing, tokens, TOKENS):
        log = _log_probabilities(
            query + at * stride_qt, q_rows, lse + at * stride_lt, lse_rows, k, ahead, tokens - at,
            scale_log2, cap, wide, TOKENS,
        )  # fmt: skip
        total = _joined(total, log, None)
    score = scores + (block * KH + lane) * BS + slot
    if offset < 0:
        column = tl.sum(total, 0)
        tl.store(score, tl.load(score, mask=live) + column, mask=live)
    else:
        tl.store(target, tl.sum(total, 0))
