# SPDX-License-Identifier: Apache-2.0
"""CPU kernels in plain torch: what runs where there is neither a compiler nor a prebuilt library.

Runs in the worker. Imports torch only. Row by row, so that a row's result does not depend on its batch;
vectorised over heads, queries and keys, summed in float32. torch cannot read pages in place: each row's K
and V are gathered and widened first. What that costs: :data:`COST`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_vllm.kernels import lanes
from h2o_vllm.kernels.cpu.batch import (
    PagedBatch,
    heads_apart,
    key_value_views,
    measured_by_page,
    tokens_of,
)
from h2o_vllm.kernels.reference import reset_scores

__all__ = [
    "COST",
    "attend_decode",
    "attend_prompt",
    "compact",
    "compact_shared",
    "describe",
    "foretell",
    "key_likeness",
    "reset_scores",
    "score_prompt",
    "value_distances",
]

COST = (
    "attention takes 5 to 15 times as long as vLLM's own when decoding, 1.4 to 3 times in prompts"
)
"""``python -m loadtest.kernels --quick --impls cpp,torch``: bfloat16, one thread of an Intel Xeon with
AMX, where C++ takes 0.6 to 1.2 times and 1.5 times as long."""

_SHORTEST = 1e-20
"""Below the square of any key's length."""

_TILE_FLOATS = 1 << 20
"""Logits that are held at once: 4 MiB, so that a long prompt needs no S x S matrix."""


def describe() -> str:
    """One line for the start-up log."""
    return f"plain torch (no C++), {torch.get_num_threads()} thread(s)"


def attend_decode(
    batch: PagedBatch,
    tokens: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """See :func:`h2o_vllm.kernels.cpu.attend_decode`."""
    for i, (token, row) in enumerate(zip(tokens.tolist(), rows.tolist(), strict=True)):
        scores = scored is None or i < scored
        _attend(batch, row, token, token + 1, scale, out, softcap, sinks, scores=scores)


def score_prompt(
    batch: PagedBatch,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """See :func:`h2o_vllm.kernels.cpu.score_prompt`."""
    attend_prompt(batch, query_start_loc, rows, scale, None, None, softcap, sinks)


def attend_prompt(
    batch: PagedBatch,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor | None,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """See :func:`h2o_vllm.kernels.cpu.attend_prompt`."""
    starts = query_start_loc.tolist()
    for i, row in enumerate(rows.tolist()):
        scores = scored is None or i < scored
        tokens = (starts[row], starts[row + 1])
        _attend(batch, row, *tokens, scale, out, softcap, sinks, scores=scores)


def _attend(
    batch: PagedBatch,
    row: int,
    first: int,
    end: int,
    scale: float,
    out: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    *,
    scores: bool,
) -> None:
    """Queries ``first`` to ``end`` of the batch, the last ones of ``row``, over the row's keys."""
    length, block_size = int(batch.seq_lens[row]), batch.kv_cache.shape[2]
    if length <= 0 or first >= end:  # padding
        return
    if batch.lanes is not None and batch.lanes.rows[row] >= 0:
        for head, (mine, alone) in enumerate(heads_apart(batch, row)):
            sink = None if sinks is None else sinks.unflatten(0, (-1, mine.stop - mine.start))[head]
            to = None if out is None else out[:, mine]
            _attend(alone, 0, first, end, scale, to, softcap, sink, scores=scores)
        return
    blocks = batch.block_table[row, : -(-length // block_size)].long()
    keys, values = key_value_views(batch.kv_cache)
    # K^T [KH, D, S] and V [KH, S, D]; cut to the live length, because unused slots may hold NaN.
    key = keys[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, :length].float()
    value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
    heads, size = key.shape[:2]
    received = key.new_zeros(heads, blocks.numel() * block_size)
    step = max(1, _TILE_FLOATS // (batch.query.shape[1] * length))
    for at in range(first, end, step):
        tokens = slice(at, min(at + step, end))
        count, context = tokens.stop - at, length - (end - at)
        seen = context + count
        # [KH, t * G, D]
        query = batch.query[tokens].float().unflatten(1, (heads, -1)).transpose(0, 1)
        logits = (query.flatten(1, 2) @ key[:, :, :seen]).mul_(scale)
        if softcap:
            logits.div_(softcap).tanh_().mul_(softcap)
        if count > 1:
            future = torch.ones(count, seen, dtype=torch.bool).triu_(context + 1)
            logits.view(heads, count, -1, seen).masked_fill_(future[:, None], float("-inf"))
        if sinks is None:
            prob = logits.softmax(-1)
        else:
            # A column that is nobody's: [KH, t * G, 1].
            sink = sinks.view(heads, 1, -1, 1).expand(-1, count, -1, -1).flatten(1, 2)
            prob = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        if scores:
            given = received[:, :seen]
            given += prob.sum(1)
        if out is not None:
            attended = (prob @ value[:, :seen]).view(heads, count, -1, size).transpose(0, 1)
            out[tokens] = attended.flatten(1, 2).to(out.dtype)
    if scores:
        # Whole blocks: slots behind the end receive zero.
        whole, old = received.unflatten(1, (-1, block_size)).transpose(0, 1), batch.scores[blocks]
        batch.scores[blocks] = old + whole


def compact(
    kv_caches: Sequence[Tensor], scores: Tensor, heavy_blocks: Tensor, doomed_blocks: Tensor
) -> None:
    """See :func:`h2o_vllm.kernels.cpu.compact`."""
    block_size = scores.shape[3]
    room = heavy_blocks.numel() * block_size
    order = torch.cat([heavy_blocks, doomed_blocks]).long()
    for layer_scores, kv_cache in zip(scores, kv_caches, strict=True):
        rank = layer_scores[order].transpose(0, 1).flatten(1)  # [KH, candidates]
        rank.masked_fill_(rank.isnan(), float("-inf"))
        best = rank.argsort(dim=1, descending=True, stable=True)[:, :room]
        stays = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, value=True)
        # Per head as many survivors leave doomed slots as heavy slots fall free, so the two lists, ordered by
        # head and candidate, pair up.
        head, source = stays[:, room:].nonzero(as_tuple=True)
        _, target = (~stays[:, :room]).nonzero(as_tuple=True)
        source += room
        to_block, to_slot = order[target // block_size], target % block_size
        from_block, from_slot = order[source // block_size], source % block_size
        keys, values = key_value_views(kv_cache)
        keys[to_block, head, :, to_slot] = keys[from_block, head, :, from_slot]
        values[to_block, head, to_slot] = values[from_block, head, from_slot]
        layer_scores[to_block, head, to_slot] = layer_scores[from_block, head, from_slot]


def compact_shared(
    kv_caches: Sequence[Tensor],
    scores: Tensor,
    heavy_blocks: Tensor,
    doomed_blocks: Tensor,
    owners: Tensor,
) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.compact_shared`."""
    views = [key_value_views(kv_cache) for kv_cache in kv_caches]
    return lanes.compact_shared(
        [keys.permute(0, 3, 1, 2) for keys, _ in views],
        [values.transpose(1, 2) for _, values in views],
        scores,
        heavy_blocks.tolist(),
        doomed_blocks.tolist(),
        owners,
    )


def foretell(
    kv_caches: Sequence[Tensor], blocks: Tensor, weights: Tensor, rotary: int, *, interleaved: bool
) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.foretell`."""
    found = []
    for kv_cache, weight in zip(kv_caches, weights, strict=True):
        keys, values = (half.float() for half in tokens_of(kv_cache, blocks))
        pairs = keys[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, rotary // 2))
        # A norm over two numbers takes 400 times as long.
        lengths = torch.hypot(*pairs.unbind(-1 if interleaved else -2))
        known = torch.cat([lengths, keys[..., rotary:], values], -1)
        if known.shape[2] != weight.shape[1] - 1:
            known = known.transpose(0, 1).flatten(1)[None]
        logs = (known @ weight[:, :-1, None])[..., 0] + weight[:, -1:]
        found.append(logs.clamp(-50.0, 0.0).exp())
    return torch.stack(found)


def key_likeness(kv_caches: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.key_likeness`."""
    if blocks.dim() == 3:
        return measured_by_page(key_likeness, kv_caches, blocks)
    found = []
    for kv_cache in kv_caches:
        # Selects in a quarter of an index's time, and in the order that is wanted: [KH, D, C].
        keys = key_value_views(kv_cache)[0].permute(1, 2, 0, 3).index_select(2, blocks.long())
        keys = keys.flatten(2).float()
        # Normalising the keys themselves would copy them: scale the products instead.
        inverse = keys.square().sum(1, keepdim=True).clamp_min(_SHORTEST).rsqrt()
        anchor = F.normalize(keys @ inverse.mT, dim=1)
        found.append(((anchor.mT @ keys) * inverse).squeeze(1))
    return torch.stack(found)


def value_distances(kv_caches: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.value_distances`."""
    if blocks.dim() == 3:
        return measured_by_page(value_distances, kv_caches, blocks)
    found = []
    for kv_cache in kv_caches:
        values = key_value_views(kv_cache)[1].index_select(0, blocks.long())
        values = values.transpose(0, 1).flatten(1, 2).float()
        found.append(torch.linalg.vector_norm(values - values.mean(1, keepdim=True), dim=-1))
    return torch.stack(found)
