# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Where a program of rescoring finds the tokens of its eviction, and what they score."""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_vllm.kernels.triton import rescores as told

__all__ = ["SIZES", "my_part", "place_of", "unprotected"]

SIZES = ["first_unit", "num_layers", "num_blocks", "stride_table", "room", "lists"]
"""Arguments of all of these kernels, for which none is compiled anew."""
_HEADER = tl.constexpr(told.HEADER)


@triton.jit
def my_part(scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, lists,
          KH: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Of this program: layer, head, its eviction's entry, where its scores are, its part of the scratch."""
    # Heads side by side: their KV is.
    head = (tl.program_id(0) % KH).to(tl.int64)
    unit = first_unit + tl.program_id(0) // KH
    layer = (unit % num_layers).to(tl.int64)
    entry = table + (unit // num_layers).to(tl.int64) * stride_table
    my_scores = scores + (layer * num_blocks * KH + head) * BS
    staged = scratch + tl.program_id(0).to(tl.int64) * room * lists
    return layer, head, entry, my_scores, staged


@triton.jit
def place_of(entry, candidate, live, BS: tl.constexpr):
    """Block id, 64 bits, and slot in the block of each candidate."""
    block = tl.load(entry + _HEADER + candidate // BS, mask=live, other=0).to(tl.int64)
    return block, candidate % BS


@triton.jit
def unprotected(my_scores, block, slot, live, KH: tl.constexpr, BS: tl.constexpr):
    """Scores of candidates, those of protected ones as 0; and who is protected."""
    old = tl.load(my_scores + block * (KH * BS) + slot, mask=live, other=0.0)
    protected = old == float("inf")
    return tl.where(protected, 0.0, old), protected
