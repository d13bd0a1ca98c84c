# SPDX-License-Identifier: Apache-2.0
"""What every CPU kernel gets: one layer's cache and a batch's queries, and how they lie in memory.

Runs in the worker. Imports torch only. Letters as in :mod:`h2o_vllm.kernels.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["PagedBatch", "key_value_views"]


class PagedBatch(NamedTuple):
    """One layer's cache and scores, and the batch that attends to it.

    Attributes:
        query: [T, H, D]; may be strided along T.
        kv_cache: [N, KH, BS, 2 * D], contiguous, same dtype as ``query``; see :func:`key_value_views`.
        scores: [N, KH, BS], float32, contiguous.
        block_table: [B, MB], int32, without holes; may be strided along B.
        seq_lens: [B], int32, live lengths.
    """

    query: Tensor
    kv_cache: Tensor
    scores: Tensor
    block_table: Tensor
    seq_lens: Tensor


def key_value_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one layer's cache as what it means: K^T ``[N, KH, D, BS]`` and V ``[N, KH, BS, D]``.

    Memory of one layer on CPU (vLLM's isa "vec" and "vec16", ``cpu_attn_vec.hpp``: reshape_and_cache)::

        kv_cache [N, KH, BS, 2 * D], contiguous; one (block, kv head) page is
        +---------------------+---------------------+
        | K transposed [D, BS]|      V [BS, D]      |   the nominal last two axes mean nothing
        +---------------------+---------------------+
    """
    blocks, heads, block_size, width = kv_cache.shape
    size = width // 2
    halves = kv_cache.view(blocks, heads, 2, block_size * size)
    keys = halves[:, :, 0].unflatten(-1, (size, block_size))
    values = halves[:, :, 1].unflatten(-1, (block_size, size))
    return keys, values
