# SPDX-License-Identifier: Apache-2.0
"""The contract of the kernels on CPU, and the truth: :mod:`h2o_vllm.kernels.reference` on CPU memory.

Runs in tests, and in the worker where it is asked for (``H2O_CPU_KERNEL=reference``) or where there are no
C++ kernels. Imports torch only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_vllm.kernels import lanes, reference
from h2o_vllm.kernels.cpu.batch import (
    PagedBatch,
    heads_apart,
    key_value_views,
)
from h2o_vllm.policy import formulas

precision = torch.float64
"""In which attention is computed; float32 where it steps in for the C++ kernels."""

STEP = 256
"""Queries that are computed at once: the logits of all of a long prompt would fill the memory."""


reset_scores = reference.reset_scores
order = formulas.order


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
    """Attention of one query per listed row; its probabilities are added to ``batch.scores``.

    A slot receives the probabilities of its key summed over the q heads of a group. The query's own key is
    the last one of its row. No row may be listed twice. An empty list does nothing.

    Args:
        tokens: [R], int32, index into ``batch.query`` and ``out``. rows: [R], int32, index into the batch.
        scale: factor on q.k before the softmax.
        out: [T, H, D]; only the listed tokens are written. May be strided along T.
        scored: number of first listed rows that add to the scores; by default all. The others
            are attention alone, and faster.
        softcap: scaled logits x become ``softcap * tanh(x / softcap)``; 0: they stay.
        sinks: [H], float32, contiguous: logits that belong to no key and join the softmax's denominator.
            What they get of the attention is in no score.
    """
    for i, (token, row) in enumerate(zip(tokens.tolist(), rows.tolist(), strict=True)):
        scores = scored is None or i < scored
        query = slice(token, token + 1)
        _attend(batch, row, query, scale, out, softcap, sinks, scores=scores)


def attend_prompt(
    batch: PagedBatch,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention of several queries per listed row, whose probabilities are added as well.

    The queries of a row are the last ``query_start_loc[row + 1] - query_start_loc[row]`` positions of
    its live sequence; there may be context before them (chunked prefill, prefix-cache hit).

    Args:
        query_start_loc: [B + 1], int32. The others are those of :func:`attend_decode`.
    """
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
    """Move the survivors of one eviction into its heavy blocks: :func:`h2o_vllm.kernels.lanes.compact`.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D]. scores: [L, N, KH, BS], float32.
        heavy_blocks: [nh], integer; must be writable by this request. doomed_blocks: [nd], integer;
            disjoint from ``heavy_blocks``. With either empty nothing happens.
        owners: [L, nh + nd, KH], integer: which head each lane of the heavy and doomed blocks belongs to.
            Every head must have one of them. ``None``: the heads share nothing.

    Returns:
        [L, nh, KH], int32: which head each lane of the heavy blocks belongs to now; ``None`` without owners.
    """
    keys, values = zip(*map(_token_views, kv_caches), strict=True)
    return lanes.compact(
        keys, values, scores, heavy_blocks.tolist(), doomed_blocks.tolist(), owners
    )


def _attend(
    batch: PagedBatch,
    row: int,
    tokens: slice,
    scale: float,
    out: Tensor,
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
            _attend(alone, 0, tokens, scale, out[:, mine], softcap, sink, scores=scores)
        return
    keys, values = _token_views(batch.kv_cache)
    for start in range(tokens.start, tokens.stop, STEP):
        part = slice(start, min(start + STEP, tokens.stop))
        seen = length - (tokens.stop - part.stop)
        where = reference.live_slots(batch.block_table[row], seen, batch.kv_cache.shape[2])
        prob, attended, _ = reference.attend(
            batch.query[part], keys, values, where, scale, softcap, sinks, precision
        )
        out[part] = attended.to(out.dtype)
        if scores:
            reference.add_probabilities(batch.scores, where, prob)


def _token_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as the reference wants them, ``[N, BS, KH, D]``; still views."""
    keys, values = key_value_views(kv_cache)
    return keys.permute(0, 3, 1, 2), values.transpose(1, 2)
