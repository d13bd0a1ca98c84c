# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Where a row's tokens lie, as the attention kernels read them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_keys", "locate"]


@triton.jit
def locate(table, position, live, BS: tl.constexpr):
    """Block id (64 bits, so that its offsets are) and slot in the block of each position of a row."""
    block = tl.load(table + position // BS, mask=live, other=0).to(tl.int64)
    return block, position % BS


@triton.jit
def load_keys(keys, at, wide, live, EVICTION: tl.constexpr):
    """K^T, [DP, positions], of one kv head; zeros beyond the head size and where nothing lives.

    ``keys``: pointers to the dimensions of some slot, [DP, 1]; ``at``: how far from it the positions' slots
    are. ``EVICTION``: of cache lines, as ``tl.load`` calls it, or "". No default: Triton 3.6 takes no string
    for one.
    """
    return tl.load(
        keys + at[None, :],
        mask=wide[:, None] & live[None, :],
        other=0.0,
        eviction_policy=EVICTION,
    )
