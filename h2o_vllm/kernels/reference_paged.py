# SPDX-License-Identifier: Apache-2.0
"""The truth for any KV layout: what :mod:`h2o_vllm.kernels.triton` computes, in plain torch and float64.

Runs in tests; any device. Imports torch only. Functions and arguments are those of the Triton kernels, less
what only a kernel needs (a workspace, upper bounds). Letters as in :mod:`h2o_vllm.kernels.reference`.

``key_cache`` and ``value_cache`` are views ``[N, BS, KH, D]`` of one layer with any strides: whatever vLLM's
order in memory, ``kv_cache.transpose(1, 2).split(D, dim=-1)`` of its ``[N, KH, BS, 2 * D]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_vllm.kernels.reference import reset_scores, select_keep

__all__ = [
    "add_prompt_scores",
    "attend",
    "attend_decode",
    "clear_scores",
    "compact",
    "compact_tables",
    "log_sum_exp",
    "reset_scores",
]


def attend_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """See :func:`h2o_vllm.kernels.triton.attend_decode`; scales of query and key are part of ``scale``."""
    for row, length in enumerate(seq_lens.tolist()):
        first, end = query_start_loc[row : row + 2].tolist()
        if length <= 0 or end - first != 1:
            continue
        where = _slots(block_table[row], length, key_cache.shape[1])
        prob, attended, _ = attend(query[first:end], key_cache, value_cache, where, scale)
        out[first] = (attended[0] * value_scale).to(out.dtype)
        _add(scores, where, prob)


def add_prompt_scores(
    query: Tensor,
    key_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    lse: Tensor,
    scale: float,
    scored_from: Tensor | None = None,
) -> None:
    """See :func:`h2o_vllm.kernels.triton.add_prompt_scores`; ``lse`` is not looked at but computed."""
    del lse
    for row, length in enumerate(seq_lens.tolist()):
        first, end = query_start_loc[row : row + 2].tolist()
        if length <= 0 or end - first < 2:
            continue
        if scored_from is not None:
            first = int(scored_from[row])
        where = _slots(block_table[row], length, key_cache.shape[1])
        prob, _, _ = attend(query[first:end], key_cache, key_cache, where, scale)
        _add(scores, where, prob)


def log_sum_exp(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Natural log of each query's sum of exp(scaled logits), ``[H, T]``, float32; NaN for rows left out.

    What an attention kernel returns beside its output (FlashAttention: ``return_softmax_lse``).
    """
    lse = torch.full((query.shape[1], query.shape[0]), float("nan"), device=query.device)
    for row, length in enumerate(seq_lens.tolist()):
        first, end = query_start_loc[row : row + 2].tolist()
        if length > 0 and end > first:
            where = _slots(block_table[row], length, key_cache.shape[1])
            _, _, sums = attend(query[first:end], key_cache, key_cache, where, scale)
            lse[:, first:end] = sums.flatten(1).T.float()
    return lse


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    where: tuple[Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of one sequence's last queries over its live slots, in float64.

    Args:
        query: [t, H, D]. where: block ids and offsets of the S live slots, in order.

    Returns:
        probabilities [t, KH, G, S], output [t, H, D], log-sum-exp [t, KH, G].
    """
    key = key_cache[where].transpose(0, 1).double()
    value = value_cache[where].transpose(0, 1).double()
    q = query.double().unflatten(1, (key.shape[0], -1))
    length = key.shape[1]
    logits = torch.einsum("tkgd,ksd->tkgs", q, key) * scale
    positions = torch.arange(length - q.shape[0], length, device=query.device)
    future = torch.arange(length, device=query.device) > positions[:, None]
    logits = logits.masked_fill(future[:, None, None], float("-inf"))
    prob = logits.softmax(-1)
    return prob, torch.einsum("tkgs,ksd->tkgd", prob, value).flatten(1, 2), logits.logsumexp(-1)


def compact(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    scores: Tensor,
    evictions: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> None:
    """See :func:`h2o_vllm.kernels.triton.compact`; ``evictions`` are pairs of heavy and doomed ids."""
    heads, block_size = scores.shape[2:]
    for heavy, doomed in evictions:
        room = len(heavy) * block_size
        heavy_ids = torch.tensor(heavy, dtype=torch.int64, device=scores.device)
        doomed_ids = torch.tensor(doomed, dtype=torch.int64, device=scores.device)
        order = torch.cat([heavy_ids, doomed_ids])
        for layer, (keys, values) in enumerate(zip(key_caches, value_caches, strict=True)):
            kept = select_keep(scores[layer], heavy_ids, doomed_ids)
            for head in range(heads):
                source = kept[head][kept[head] >= room]
                stays = torch.isin(torch.arange(room, device=scores.device), kept[head])
                target = (~stays).nonzero().flatten()
                to_block, to_slot = order[target // block_size], target % block_size
                from_block, from_slot = order[source // block_size], source % block_size
                for cache in (keys, values):
                    cache[to_block, to_slot, head] = cache[from_block, from_slot, head]
                scores[layer, to_block, head, to_slot] = scores[layer, from_block, head, from_slot]


def compact_tables(
    block_table: Tensor, seq_lens: Tensor, flags: Tensor, block_size: int
) -> tuple[list[list[int]], list[int]]:
    """Block ids and live length of each row; see :func:`h2o_vllm.kernels.triton.compact_tables`."""
    tables, lens = [], []
    for row, length in enumerate(seq_lens.tolist()):
        used = block_table[row, : -(-length // block_size)].tolist()
        live = [block for block in used if block != 0] if flags[row] & 1 else used
        tables.append(live)
        lens.append(length - (len(used) - len(live)) * block_size)
    return tables, lens


def clear_scores(scores: Tensor, block_table: Tensor, seq_lens: Tensor, rows: Tensor) -> None:
    """See :func:`h2o_vllm.kernels.triton.clear_scores`."""
    for row in rows.tolist():
        used = -(-int(seq_lens[row]) // scores.shape[3])
        blocks = block_table[row, :used].long()
        old = scores[:, blocks]
        scores[:, blocks] = torch.where(old == float("inf"), old, 0.0)


def _slots(table: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    slots = torch.arange(length, device=table.device)
    return table[slots // block_size].long(), slots % block_size


def _add(scores: Tensor, where: tuple[Tensor, Tensor], prob: Tensor) -> None:
    blocks, offsets = where
    scores[blocks, :, offsets] += prob.sum((0, 2)).T.float()
