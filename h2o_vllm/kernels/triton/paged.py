# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Paged access of the attention kernels: the places of a row's tokens, and loads of keys."""

from collections.abc import Hashable

import triton
import triton.language as tl

from h2o_vllm.kernels.batch import LayerBatch


def form_of(batch: LayerBatch) -> tuple[Hashable, ...]:
    """What of a batch decides the compiled form of a kernel, see :func:`.launching.launch`."""
    query, keys, sinks = batch.query, batch.key_cache, batch.sinks
    return (
        keys.shape, keys.stride(), batch.value_cache.stride(), query.shape[1], query.stride(), keys.dtype,
        query.dtype, batch.query_scale is None, batch.key_scale is None, batch.value_scale is None,
        batch.softcap == 0, None if sinks is None else sinks.dtype, batch.lanes is None,
    )  # fmt: skip


@triton.jit
def locate(table, position, live, BS: tl.constexpr):
    """Block id and slot in the block of each position of a row; block ids have 64 bits, as have offsets."""
    block = tl.load(table + position // BS, mask=live, other=0).to(tl.int64)
    return block, position % BS


@triton.jit
def load_keys(keys, at, wide, live):
    """K^T, [DP, positions], of one KV head; zeros beyond the head size and where no token lives.

    ``keys``: pointers to the dimensions of some slot, [DP, 1]; ``at``: offsets of the positions' slots from
    it.
    """
    return tl.load(keys + at[None, :], mask=wide[:, None] & live[None, :], other=0.0)
