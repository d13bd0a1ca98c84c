# SPDX-License-Identifier: Apache-2.0
"""The truth behind the calls of :mod:`h2o_vllm.kernels.cpu`: :mod:`h2o_vllm.kernels.reference` on CPU memory.

Runs in tests, and in the worker where it is asked for (``H2O_CPU_KERNEL=reference``) or where there are no
C++ kernels. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_vllm.kernels import lanes, reference
from h2o_vllm.kernels.cpu.batch import (
    PagedBatch,
    heads_apart,
    key_value_views,
    measured,
    tokens_of,
)
from h2o_vllm.kernels.reference import reset_scores
from h2o_vllm.policy import formulas

__all__ = [
    "attend_decode",
    "attend_prompt",
    "compact",
    "describe",
    "key_similarity",
    "predict",
    "reset_scores",
    "score_prompt",
    "value_distances",
]


precision = torch.float64
"""In which attention is computed; float32 where it steps in for the C++ kernels."""

STEP = 256
"""Queries that are computed at once: the logits of all of a long prompt would fill the memory."""


def describe() -> str:
    """One line for the start-up log."""
    return f"plain torch reference in {str(precision).removeprefix('torch.')} (slow)"


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
        query = slice(token, token + 1)
        _attend(batch, row, query, scale, out, softcap, sinks, scores=scores)


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
    for i, row in enumerate(rows.tolist()):
        tokens = slice(int(query_start_loc[row]), int(query_start_loc[row + 1]))
        scores = scored is None or i < scored
        _attend(batch, row, tokens, scale, out, softcap, sinks, scores=scores)


def compact(
    kv_caches: Sequence[Tensor],
    scores: Tensor,
    heavy_blocks: Tensor,
    doomed_blocks: Tensor,
    owners: Tensor | None = None,
) -> Tensor | None:
    """See :func:`h2o_vllm.kernels.cpu.compact`."""
    keys, values = zip(*map(_token_views, kv_caches), strict=True)
    return lanes.compact(
        keys, values, scores, heavy_blocks.tolist(), doomed_blocks.tolist(), owners
    )


def predict(
    kv_caches: Sequence[Tensor],
    blocks: Tensor,
    weights: Tensor,
    rotary: int,
    *,
    interleaved: bool,
    sums_alone: bool = False,
) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.predict`."""
    found = [
        reference.predicted_sums(*tokens_of(kv, blocks), weight, rotary, interleaved=interleaved)
        for kv, weight in zip(kv_caches, weights, strict=True)
    ]
    sums = torch.stack(found)
    return sums.float() if sums_alone else reference.attention_of(sums)


def merge_ranks(first: Tensor, *others: Tensor) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.merge_ranks`."""
    return formulas.merge_ranks(first, *others)


def key_similarity(kv_caches: Sequence[Tensor], pages: Tensor) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.key_similarity`."""
    return measured(lambda keys, _: reference.key_similarity(keys), kv_caches, pages)


def value_distances(kv_caches: Sequence[Tensor], pages: Tensor) -> Tensor:
    """See :func:`h2o_vllm.kernels.cpu.value_distances`."""
    return measured(lambda _, values: reference.value_distances(values), kv_caches, pages)


def _attend(
    batch: PagedBatch,
    row: int,
    tokens: slice,
    scale: float,
    out: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    *,
    scores: bool,
) -> None:
    length = int(batch.seq_lens[row])
    if length <= 0 or tokens.start >= tokens.stop:  # padding
        return
    if batch.lanes is not None and batch.lanes.rows[row] >= 0:
        for head, (mine, alone) in enumerate(heads_apart(batch, row)):
            sink = None if sinks is None else sinks.unflatten(0, (-1, mine.stop - mine.start))[head]
            to = None if out is None else out[:, mine]
            _attend(alone, 0, tokens, scale, to, softcap, sink, scores=scores)
        return
    keys, values = _token_views(batch.kv_cache)
    for start in range(tokens.start, tokens.stop, STEP):
        part = slice(start, min(start + STEP, tokens.stop))
        seen = length - (tokens.stop - part.stop)
        where = reference.live_slots(batch.block_table[row], seen, batch.kv_cache.shape[2])
        prob, attended, _ = reference.attend(
            batch.query[part], keys, values, where, scale, softcap, sinks, precision
        )
        if out is not None:
            out[part] = attended.to(out.dtype)
        if scores:
            reference.add_probabilities(batch.scores, where, prob)


def _token_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as the reference wants them, ``[N, BS, KH, D]``; still views."""
    keys, values = key_value_views(kv_cache)
    return keys.permute(0, 3, 1, 2), values.transpose(1, 2)
