# SPDX-License-Identifier: Apache-2.0
"""The truth: every kernel in plain torch, float64 inside, written to be read. Any device, any memory layout.

Runs in tests and, through :mod:`h2o_vllm.kernels.cpu.reference`, in a worker that asks for it. Imports torch
and :mod:`.batch`, nothing of the fast kernels. Arguments are those of :mod:`h2o_vllm.kernels.triton`, less
what only a kernel needs (a workspace, upper bounds).

Letters: T tokens, H q heads, KH kv heads, G = H / KH, D head size, N blocks, BS block size,
B requests, MB blocks per table row, R listed rows, L layers, S live length.

``key_cache`` and ``value_cache`` are views ``[N, BS, KH, D]`` of one layer with any strides: on GPUs
``kv_cache.transpose(1, 2).split(D, dim=-1)`` of vLLM's ``[N, KH, BS, 2 * D]``; on CPU see
:func:`h2o_vllm.kernels.cpu.batch.key_value_views`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from h2o_vllm.kernels.batch import LayerBatch

Slots = tuple[Tensor, Tensor]
"""Block ids and offsets of the S live slots of a sequence, in order; [S] each."""


def live_slots(table: Tensor, length: int, block_size: int) -> Slots:
    """Where the ``length`` live tokens of the row with block table ``table`` [MB] lie."""
    slots = torch.arange(length, device=table.device)
    return table[slots // block_size].long(), slots % block_size


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    where: Slots,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of one sequence's last queries over its live slots, computed in ``dtype``.

    Args:
        query: [t, H, D]. scale: factor on q.k before the softmax.
        softcap, sinks: see :class:`.batch.LayerBatch`.

    Returns:
        probabilities [t, KH, G, S], output [t, H, D], log-sum-exp [t, KH, G], sinks included.
    """
    # Only live slots are gathered: the others may hold NaN.
    key = key_cache[where].transpose(0, 1).to(dtype)
    value = value_cache[where].transpose(0, 1).to(dtype)
    q = query.to(dtype).unflatten(1, (key.shape[0], -1))
    length = key.shape[1]
    logits = torch.einsum("tkgd,ksd->tkgs", q, key) * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    positions = torch.arange(length - q.shape[0], length, device=query.device)
    future = torch.arange(length, device=query.device) > positions[:, None]
    logits = logits.masked_fill(future[:, None, None], float("-inf"))
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = lse.logaddexp(sinks.to(dtype).view(logits.shape[1:3]))
    prob = (logits - lse[..., None]).exp()
    return prob, torch.einsum("tkgs,ksd->tkgd", prob, value).flatten(1, 2), lse


def add_probabilities(scores: Tensor, where: Slots, prob: Tensor) -> None:
    """Add ``prob`` [t, KH, G, S], summed over queries and the q heads of a group, to scores [N, KH, BS]."""
    blocks, offsets = where
    scores[blocks, :, offsets] += prob.sum((0, 2)).T.float()


def attend_decode(batch: LayerBatch, out: Tensor) -> None:
    """See :func:`h2o_vllm.kernels.triton.attend_decode`: of all rows with one query, without lanes."""
    for tokens, where in live_rows(batch):
        if tokens.stop - tokens.start == 1:
            prob, attended, _ = attend_row(batch, tokens, where)
            out[tokens] = attended.to(out.dtype)
            add_probabilities(batch.scores, where, prob)


def add_prompt_scores(batch: LayerBatch) -> None:
    """See :func:`h2o_vllm.kernels.triton.add_prompt_scores`; log-sum-exps are not given but computed."""
    for tokens, where in live_rows(batch):
        if tokens.stop - tokens.start > 1:
            prob, _, _ = attend_row(batch, tokens, where)
            add_probabilities(batch.scores, where, prob)


def attend_row(batch: LayerBatch, tokens: slice, where: Slots) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attend` of the last queries of one row of a batch, by its scales."""
    scale, value_scale = batch.scale, 1.0 if batch.value_scale is None else float(batch.value_scale)
    for one in (batch.query_scale, batch.key_scale):
        scale *= 1.0 if one is None else float(one)
    caches = (batch.key_cache, batch.value_cache)
    prob, out, lse = attend(batch.query[tokens], *caches, where, scale, batch.softcap, batch.sinks)
    return prob, out * value_scale, lse


def live_rows(batch: LayerBatch) -> Iterator[tuple[slice, Slots]]:
    """Queries and live slots of each row that has both."""
    starts = batch.query_start_loc.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        tokens = slice(*starts[row : row + 2])
        if length > 0 and tokens.stop > tokens.start:
            yield tokens, live_slots(batch.block_table[row], length, batch.key_cache.shape[1])


def reset_scores(scores: Tensor, slots: Tensor) -> None:
    """Set the scores of newly written slots to zero, in all layers and heads.

    Args:
        scores: [L, N, KH, BS], float32. slots: [n], int64, ``block_id * BS + offset``; negative ones
            (vLLM's padding) are skipped.
    """
    live = slots >= 0
    block, offset = slots[live] // scores.shape[3], slots[live] % scores.shape[3]
    scores[:, block, :, offset] = 0.0
