# SPDX-License-Identifier: Apache-2.0
"""What every CPU kernel gets: one layer's cache and a batch's queries, and how they lie in memory.

Runs in the worker. Imports torch and :mod:`h2o_vllm.errors`. Letters as in :mod:`h2o_vllm.kernels.reference`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Cache dtypes that the kernels read."""


class Lanes(NamedTuple):
    """Rows whose heads share the slots of their heavy blocks, see :mod:`h2o_vllm.kernels.lanes`.

    A row's heavy blocks are the first of its block table. A head's keys lie in the lanes that it has of them,
    and in its own lanes of the other blocks; the heads of a row have different live lengths.

    Attributes:
        rows: [B], int32: where a row's lanes stand in the others; -1: its heads share nothing.
        pages: [S, KH, MP], int32, contiguous: page ids, ``block_id * KH + lane``.
        counts: [S, KH], int32, contiguous: number of first pages that a head has; at least one.
        heavy: [S], int32, contiguous: how many heavy blocks there are.
    """

    rows: Tensor
    pages: Tensor
    counts: Tensor
    heavy: Tensor


class PagedBatch(NamedTuple):
    """One layer's cache and scores, and the batch that attends to it.

    Attributes:
        query: [T, H, D]; may be strided along T.
        kv_cache: [N, KH, BS, 2 * D], contiguous, same dtype as ``query``; see :func:`key_value_views`.
        scores: [N, KH, BS], float32, contiguous.
        block_table: [B, MB], int32, without holes; may be strided along B.
        seq_lens: [B], int32, live lengths; where heads share slots, their mean.
        lanes: which rows' heads do; ``None``: none.
    """

    query: Tensor
    kv_cache: Tensor
    scores: Tensor
    block_table: Tensor
    seq_lens: Tensor
    lanes: Lanes | None = None


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


def check_caches(kv_caches: Sequence[Tensor]) -> None:
    """Check the caches of all layers once, at start-up. The kernels check nothing: they would write anywhere.

    Raises:
        ConfigError: they are not contiguous, or not of one shape and dtype that the kernels read.
    """
    first = kv_caches[0]
    if first.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"the KV cache dtype must be one of {names}, got {first.dtype}")
    block_size, size = first.shape[2], first.shape[3] // 2
    if block_size % 16 or size % 16:
        raise ConfigError(
            f"block size and head size must be multiples of 16, got {block_size} and {size}"
        )
    if any(one.shape != first.shape or one.dtype != first.dtype for one in kv_caches):
        raise ConfigError("the KV caches of all layers must have one shape and dtype")
    if not all(one.is_contiguous() for one in kv_caches):
        raise ConfigError("the KV caches of all layers must be contiguous")


def _one_headed(pages: Tensor) -> Tensor:
    """``pages`` [N, KH, BS, ...] as those of a cache with one head, whose block ids are our page ids."""
    return pages.flatten(0, 1).unsqueeze(1)


def heads_apart(batch: PagedBatch, row: int) -> Iterator[tuple[slice, PagedBatch]]:
    """A row whose heads share slots, as one row with one head for each of its heads.

    Yields:
        The q heads of a KV head, and a batch whose row 0 is the row as this head sees it.
    """
    assert batch.lanes is not None
    _, pages, counts, heavy = batch.lanes
    num_heads, block_size = batch.kv_cache.shape[1:3]
    group = batch.query.shape[1] // num_heads
    at, live = int(batch.lanes.rows[row]), int(batch.seq_lens[row])
    blocks = -(-live // block_size)
    others = batch.block_table[row, int(heavy[at]) : blocks]
    for head in range(num_heads):
        count = int(counts[at, head])
        own = torch.cat([pages[at, head, :count], others * num_heads + head])
        length = live + (count - int(heavy[at])) * block_size
        queries = slice(head * group, (head + 1) * group)
        yield (
            queries,
            PagedBatch(
                batch.query[:, queries],
                _one_headed(batch.kv_cache),
                _one_headed(batch.scores),
                own[None],
                torch.tensor([length], dtype=torch.int32),
            ),
        )
