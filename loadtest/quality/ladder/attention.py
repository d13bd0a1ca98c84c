# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence, or of many rows that share a prompt's KV and hide different tokens of it.

G: query heads of a KV head; S: the prompt's tokens; N: a row's own; R: rows; else as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "KV",
    "appended",
    "causal_probabilities",
    "mix",
    "row_mix",
    "row_probabilities",
    "shared_attention",
]

CHUNK = 256
"""Queries of one sequence at a time."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
"""What ``scaled_dot_product_attention`` calls on CPU: only here it returns the logarithm of the sum, too,
with which attention over two sets of keys is put together."""


@dataclass(frozen=True)
class KV:
    """One layer's keys (rotated) and values, [KH, S, D]; of many rows [R, KH, N, D]."""

    keys: Tensor
    values: Tensor


def appended(before: KV | None, key: Tensor, value: Tensor) -> KV:
    """With new tokens behind those before."""
    if before is None:
        return KV(key, value)
    return KV(torch.cat([before.keys, key], -2), torch.cat([before.values, value], -2))


def causal_probabilities(
    query: Tensor, keys: Tensor, start: int, scaling: float
) -> Iterator[Tensor]:
    """Of one sequence: yields what some queries give to all keys they see, [KH, G, t, end], float32.

    Args:
        query: [H, T, D], of the tokens from ``start`` on. keys: [KH, S, D].
    """
    heads, count, _ = keys.shape
    wide = keys.float()
    grouped = query.float().unflatten(0, (heads, -1)) * scaling
    for first in range(start, count, CHUNK):
        end = min(first + CHUNK, count)
        some = grouped[:, :, first - start : end - start]
        logits = some @ wide[:, None, :end].mT
        hidden = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        logits[..., first:].masked_fill_(hidden, float("-inf"))
        yield logits.softmax(-1)


def mix(prob: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """prob: [KH, G, t, end]; values: [KH, S, D]. Returns [H, t, D]."""
    mixed = prob.to(dtype) @ values[:, None, : prob.shape[-1]]
    return mixed.flatten(0, 1)


def shared_attention(query: Tensor, shared: KV, kept: Tensor, own: KV, scaling: float) -> Tensor:
    """query: [R, KH, G, T, D]; kept: [R, KH, S], at least one of each head; all own tokens are there.

    Returns [R, KH, G, T, D].
    """
    rows, heads, group, new, _ = query.shape
    flat = query.flatten(2, 3)
    length, count = shared.keys.shape[1], own.keys.shape[2]
    bias = torch.zeros(rows, heads, 1, length, dtype=query.dtype)
    bias.masked_fill_(~kept[:, :, None], float("-inf"))
    every = [one.expand(rows, -1, -1, -1) for one in (shared.keys, shared.values)]
    theirs, total = _flash(flat, *every, 0.0, False, attn_mask=bias, scale=scaling)
    logits = (flat.float() @ own.keys.float().mT * scaling).view(rows, heads, group, new, count)
    later = torch.ones(new, new, dtype=torch.bool).triu(1)
    logits[..., count - new :].masked_fill_(later, float("-inf"))
    logits = logits.flatten(2, 3)
    mine = logits.softmax(-1) @ own.values.float()
    weight = (total - logits.logsumexp(-1)).sigmoid()[..., None]
    mixed = weight * theirs.float() + (1 - weight) * mine
    return mixed.view(query.shape).to(query.dtype)


def row_probabilities(query: Tensor, keys: Tensor, alive: Tensor, own_keys: Tensor) -> Tensor:
    """What each row's queries give to all keys, [R, KH, G, T, S + N], float32.

    Args:
        query: [R, KH, G, T, D], scaled; keys: [KH, S, D]; alive: [R, KH, S + N]; own_keys: [R, KH, N, D].
    """
    rows, heads, group, new, size = query.shape
    length, own = keys.shape[1], own_keys.shape[2]
    # Rows that share keys are one matrix.
    flat = query.transpose(0, 1).reshape(heads, -1, size)
    logits = torch.empty(rows, heads, group, new, length + own)
    logits[..., :length] = (flat @ keys.mT).view(heads, rows, group, new, length).transpose(0, 1)
    logits[..., length:] = (query.flatten(2, 3) @ own_keys.mT).view(rows, heads, group, new, own)
    later = torch.ones(new, new, dtype=torch.bool).triu(1)
    logits[..., length + own - new :].masked_fill_(later, float("-inf"))
    logits.masked_fill_(~alive[:, :, None, None], float("-inf"))
    return logits.softmax(-1)


def row_mix(prob: Tensor, values: Tensor, own_values: Tensor) -> Tensor:
    """prob: [R, KH, G, T, S + N]; values: [KH, S, D]; own_values: [R, KH, N, D]. Returns [R, KH, G, T, D]."""
    rows, heads, group, new, _ = prob.shape
    length, size = values.shape[1], values.shape[2]
    theirs = prob[..., :length].transpose(0, 1).reshape(heads, rows * group * new, length)
    mixed = (theirs @ values).view(heads, rows, group, new, size).transpose(0, 1)
    own = prob[..., length:].flatten(2, 3) @ own_values
    return mixed + own.view(rows, heads, group, new, size)
