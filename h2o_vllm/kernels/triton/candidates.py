# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""How a program of rescoring finds the tokens of its eviction, and their scores."""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_vllm.kernels.triton import rescores as told

__all__ = [
    "SIZES",
    "known_lanes",
    "list_of",
    "my_part",
    "place_of",
    "scores_of",
    "segments_of",
    "shared_place_of",
]

SIZES = ["first_unit", "num_layers", "num_blocks", "stride_table", "part"]
"""Arguments that all rescoring kernels take without specialisation: new values compile nothing."""
_HEADER = tl.constexpr(told.HEADER)
_SEGMENT = tl.constexpr(told.SEGMENT)


@triton.jit
def my_part(scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, part,
          KH: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """This program's layer and head, its eviction's entry, its scores, and its part of the scratch."""
    # Heads are adjacent, as their KV is.
    head = (tl.program_id(0) % KH).to(tl.int64)
    unit = first_unit + tl.program_id(0) // KH
    layer = (unit % num_layers).to(tl.int64)
    entry = table + (unit // num_layers).to(tl.int64) * stride_table
    my_scores = scores + (layer * num_blocks * KH + head) * BS
    staged = scratch + tl.program_id(0).to(tl.int64) * part
    return layer, head, entry, my_scores, staged


@triton.jit
def place_of(entry, candidate, live, BS: tl.constexpr):
    """Block id, 64 bits, and slot in the block of each candidate."""
    block = tl.load(entry + _HEADER + candidate // BS, mask=live, other=0).to(tl.int64)
    return block, candidate % BS


@triton.jit
def known_lanes(entry, offsets, layer, num_slots, head, KH: tl.constexpr):
    """A head's first entry in the request's list, -1 if known blocks are not shared; its number of lanes."""
    slot = tl.load(entry + 6)
    at = offsets + (layer * num_slots + tl.maximum(slot, 0)) * (KH + 1) + head
    first = tl.load(at, mask=slot >= 0, other=-1)
    end = tl.load(at + 1, mask=slot >= 0, other=0)
    return first, tl.where(slot >= 0, end - first, tl.load(entry))


@triton.jit
def shared_place_of(
    entry, pages, first, count, candidate, live, head, KH: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """As :func:`place_of`, for the candidates of a head that has ``count`` lanes of the known blocks.

    Also returns each candidate's lane minus the head's own lane. ``first``: see :func:`known_lanes`;
    ``pages``: the layer's pages.
    """
    index = candidate // BS
    known = index < count
    listed = live & (index < tl.where(first >= 0, count, 0))
    at = tl.where(listed, first + index, 0)
    behind = tl.load(entry) + index - count
    word = tl.where(listed, at // KH, tl.where(known, index, behind))
    block = tl.load(entry + _HEADER + word, mask=live, other=0)
    page = tl.load(pages + block * KH + at % KH, mask=listed, other=0)
    block = tl.where(listed, page // KH, block)
    return block.to(tl.int64), candidate % BS, tl.where(listed, page % KH - head, 0)


@triton.jit
def list_of(ops, op: tl.constexpr):
    """Number of the ranks in ``ops`` that come before ``op``."""
    before, count = ops & (op - 1), 0
    for bit in tl.static_range(8):
        count += (before >> bit) & 1
    return count


@triton.jit
def segments_of(entry, most, BS: tl.constexpr):
    """Number of programs that share the candidates of a head, at most ``most``."""
    return tl.maximum(tl.minimum(tl.load(entry + 1) * BS // _SEGMENT, most), 1)


@triton.jit
def scores_of(my_scores, block, slot, live, KH: tl.constexpr, BS: tl.constexpr):
    """Scores of candidates."""
    return tl.load(my_scores + block * (KH * BS) + slot, mask=live, other=0.0)
