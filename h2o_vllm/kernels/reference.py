# SPDX-License-Identifier: Apache-2.0
"""The truth: every kernel in plain torch, float64 inside, written to be read.

Runs in tests and, if asked for with ``H2O_CPU_KERNEL=reference``, in the worker. Imports torch only.

Letters: T tokens, H q heads, KH kv heads, G = H / KH, D head size, N blocks, BS block size,
B requests, MB blocks per table row, R listed rows, L layers, S live length.

Memory of one layer on CPU (vLLM's isa "vec" and "vec16", ``cpu_attn_vec.hpp``: reshape_and_cache)::

    kv_cache [N, KH, BS, 2 * D], contiguous; one (block, kv head) page is
    +---------------------+---------------------+
    | K transposed [D, BS]|      V [BS, D]      |   the nominal last two axes mean nothing
    +---------------------+---------------------+
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "attend_decode",
    "attend_prompt",
    "compact",
    "describe",
    "key_value_views",
    "reset_scores",
    "score_prompt",
    "select_keep",
]


def key_value_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one layer's cache as what it means: K^T ``[N, KH, D, BS]`` and V ``[N, KH, BS, D]``."""
    blocks, heads, block_size, width = kv_cache.shape
    size = width // 2
    halves = kv_cache.view(blocks, heads, 2, block_size * size)
    keys = halves[:, :, 0].unflatten(-1, (size, block_size))
    values = halves[:, :, 1].unflatten(-1, (block_size, size))
    return keys, values


def attend_decode(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of one query per listed row, and its probabilities added to ``scores``.

    Args:
        query: [T, H, D]; may be strided along T.
        kv_cache: [N, KH, BS, 2 * D], same dtype as ``query``; the query's own key is its last one.
        scores: [N, KH, BS], float32; receives the probabilities summed over the q heads of a group.
        block_table: [B, MB], int32. seq_lens: [B], int32, live lengths.
        tokens: [R], int32, index into ``query`` and ``out``. rows: [R], int32, index into the batch.
        scale: factor on q.k before the softmax.
        out: [T, H, D]; only the listed tokens are written. May be strided along T.

    No row may be listed twice. An empty list does nothing.
    """
    for token, row in zip(tokens.tolist(), rows.tolist(), strict=True):
        length = int(seq_lens[row])
        _attend(
            query, kv_cache, scores, block_table[row], length, slice(token, token + 1), scale, out
        )


def score_prompt(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
) -> None:
    """Column sums of the causal softmax of each listed row's queries, added to ``scores``.

    The queries of a row are the last ``query_start_loc[row + 1] - query_start_loc[row]`` positions of
    its live sequence; there may be context before them (chunked prefill, prefix-cache hit).

    Args:
        query_start_loc: [B + 1], int32. The others are those of :func:`attend_decode`.
    """
    attend_prompt(
        query, kv_cache, scores, block_table, seq_lens, query_start_loc, rows, scale, None
    )


def attend_prompt(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor | None,
) -> None:
    """:func:`score_prompt` that also writes the attention output of the same queries to ``out``."""
    for row in rows.tolist():
        tokens = slice(int(query_start_loc[row]), int(query_start_loc[row + 1]))
        _attend(query, kv_cache, scores, block_table[row], int(seq_lens[row]), tokens, scale, out)


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    table: Tensor,
    length: int,
    tokens: slice,
    scale: float,
    out: Tensor | None,
) -> None:
    if length <= 0 or tokens.start >= tokens.stop:  # padding
        return
    block_size = kv_cache.shape[2]
    blocks = table[: -(-length // block_size)].long()
    keys, values = key_value_views(kv_cache)
    # [KH, S, D], in float64; the tail of the last block is cut off before anything is computed.
    key = keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length].double()
    value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double()
    q = query[tokens].double().unflatten(1, (key.shape[0], -1))
    logits = torch.einsum("tkgd,ksd->tkgs", q, key) * scale
    positions = torch.arange(length - q.shape[0], length)
    future = torch.arange(length) > positions[:, None]
    prob = logits.masked_fill(future[:, None, None], float("-inf")).softmax(-1)
    if out is not None:
        out[tokens] = torch.einsum("tkgs,ksd->tkgd", prob, value).flatten(1, 2).to(out.dtype)
    slots = torch.arange(length)
    where = (blocks[slots // block_size], slice(None), slots % block_size)
    scores[where] += prob.sum((0, 2)).T.float()


def select_keep(scores: Tensor, heavy_blocks: Tensor, doomed_blocks: Tensor) -> Tensor:
    """Which candidates of one layer survive an eviction: the highest-scored ones, per kv head.

    Candidates are numbered in the order heavy blocks, then doomed blocks. Of equal scores the lower
    number survives; NaN ranks lowest.

    Args:
        scores: [N, KH, BS], float32. heavy_blocks: [nh]. doomed_blocks: [nd].

    Returns:
        [KH, nh * BS], int64: the surviving candidate numbers, ascending.
    """
    order = torch.cat([heavy_blocks, doomed_blocks]).long()
    rank = scores[order].transpose(0, 1).flatten(1)
    rank = torch.where(rank.isnan(), float("-inf"), rank)
    keep = heavy_blocks.numel() * scores.shape[2]
    best = rank.argsort(dim=1, descending=True, stable=True)
    return best[:, :keep].sort(dim=1).values


def compact(
    kv_caches: Sequence[Tensor], scores: Tensor, heavy_blocks: Tensor, doomed_blocks: Tensor
) -> None:
    """Move the survivors of one request's eviction into its heavy blocks, with their scores.

    Per layer and kv head: survivors in heavy blocks stay where they are; those in doomed blocks are
    copied, in ascending order, over the heavy slots whose tokens did not survive, in ascending order.
    Doomed blocks are read, never written. Does not free anything.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D]. scores: [L, N, KH, BS], float32.
        heavy_blocks: [nh], integer; must be writable by this request. doomed_blocks: [nd], integer;
            disjoint from ``heavy_blocks``. With either empty nothing happens.
    """
    heads, block_size = scores.shape[2:]
    room = heavy_blocks.numel() * block_size
    order = torch.cat([heavy_blocks, doomed_blocks]).long()
    for layer, kv_cache in enumerate(kv_caches):
        keys, values = key_value_views(kv_cache)
        kept = select_keep(scores[layer], heavy_blocks, doomed_blocks)
        for head in range(heads):
            source = kept[head][kept[head] >= room]
            stays = torch.isin(torch.arange(room), kept[head])
            target = (~stays).nonzero().flatten()
            to_block, to_slot = order[target // block_size], target % block_size
            from_block, from_slot = order[source // block_size], source % block_size
            keys[to_block, head, :, to_slot] = keys[from_block, head, :, from_slot]
            values[to_block, head, to_slot] = values[from_block, head, from_slot]
            scores[layer, to_block, head, to_slot] = scores[layer, from_block, head, from_slot]


def reset_scores(scores: Tensor, slots: Tensor, values: Tensor | None = None) -> None:
    """Give newly written slots their first score, in all layers and heads.

    Args:
        scores: [L, N, KH, BS], float32. slots: [n], int64, ``block_id * BS + offset``; negative ones
            (vLLM's padding) are skipped. values: [L, KH, n], float32; zero if left out.
    """
    live = slots >= 0
    block, offset = slots[live] // scores.shape[3], slots[live] % scores.shape[3]
    # Advanced indices around a slice: the result is [n, L, KH].
    scores[:, block, :, offset] = 0.0 if values is None else values[:, :, live].permute(2, 0, 1)


def describe() -> str:
    """One line for the start-up log."""
    return "plain torch reference (slow)"
