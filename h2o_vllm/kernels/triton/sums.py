# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Keys and values of an eviction's candidates, and their sums, for rescoring.

If there are many candidates, those of one (eviction, layer, head) are divided into segments. Segment i of n
has every n-th tile, and one program processes it. After the lists of :mod:`.ranks` the scratch holds, per
segment, a sum of normalised keys and a sum of values, ``DP`` numbers each. At the end of the part it holds
one number per segment: the sum of the values' distances from their mean, divided by the number of candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.candidates import (
    SIZES,
    known_lanes,
    my_part,
    place_of,
    segments_of,
    shared_place_of,
)
from h2o_vllm.policy.ranks import Op

__all__ = [
    "add_up",
    "cache_at",
    "distance_from",
    "inverse_length",
    "sum_of",
    "vectors",
    "vectors_of_any",
]

_VALUE = tl.constexpr(int(Op.VALUE))
_KEY = tl.constexpr(int(Op.KEY))
_TINY = tl.constexpr(1e-20)


@triton.jit
def cache_at(pointer, any_cache):
    """Pointer to a layer's keys or values, with the dtype of ``any_cache``, aligned to 8 bytes."""
    return tl.multiple_of(tl.load(pointer).to(any_cache.dtype), 8)


@triton.jit
def vectors(cache, block, slot, live, stride_n, stride_s, D: tl.constexpr, DP: tl.constexpr):
    """Keys or values of one head, [TILE, DP], float32; zeros beyond the head size and for padding."""
    return _vectors_at(cache, block * stride_n + slot * stride_s, live, D, DP)


@triton.jit
def _vectors_at(cache, at, live, D: tl.constexpr, DP: tl.constexpr):
    wide = tl.arange(0, DP)[None, :]
    mask = live[:, None] & (wide < D)
    return tl.load(cache + at[:, None] + wide, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def vectors_of_any(cache, entry, pages, first, count, candidate, live, head, stride_n, stride_s, stride_h,
                   KH: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """As :func:`vectors`, for any candidates of a head, which may have lanes of other heads."""
    if pages is None:
        block, slot = place_of(entry, candidate, live, BS)
        at = block * stride_n + slot * stride_s
    else:
        block, slot, away = shared_place_of(
            entry, pages, first, count, candidate, live, head, KH, BS
        )  # fmt: skip
        at = block * stride_n + slot * stride_s + away * stride_h
    return _vectors_at(cache, at, live, D, DP)


@triton.jit
def inverse_length(keys):
    """[TILE]: the inverse of each key's length."""
    return tl.rsqrt(tl.maximum(tl.sum(keys * keys, 1), _TINY))


@triton.jit
def distance_from(centre, values):
    """[TILE]: the distance of each value from ``centre``, [DP]."""
    away = values - centre[None, :]
    return tl.sqrt(tl.sum(away * away, 1))


@triton.jit
def _sum(cache, entry, pages, first, count, start, total, step, head, stride_n, stride_s, stride_h,
         NORMALISED: tl.constexpr, KH: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """[DP]: the sum of the candidates' vectors in the tiles at ``start``, ``start + step``, ..."""
    sums = tl.zeros([TILE, DP], tl.float32)
    for at in range(start, total, step):
        candidate = at + tl.arange(0, TILE)
        found = vectors_of_any(cache, entry, pages, first, count, candidate, candidate < total, head,
                               stride_n, stride_s, stride_h, KH, BS, D, DP)  # fmt: skip
        if NORMALISED:
            found *= inverse_length(found)[:, None]
        sums += found
    return tl.sum(sums, 0)


@triton.jit
def sum_of(cache, sums, segments, entry, pages, first, count, total, head, stride_n, stride_s, stride_h,
           NORMALISED: tl.constexpr, ALONE: tl.constexpr, KH: tl.constexpr, BS: tl.constexpr,
           D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[DP]: the sum over all candidates, from the segments' sums, or computed here if ``ALONE``."""
    if ALONE:
        found = _sum(cache, entry, pages, first, count, 0, total, TILE, head, stride_n, stride_s, stride_h,
                     NORMALISED, KH, BS, D, DP, TILE)  # fmt: skip
    else:
        found = tl.zeros([DP], tl.float32)
        for segment in range(segments):
            found += tl.load(sums + segment * 2 * DP + tl.arange(0, DP))
    return found


@triton.jit(do_not_specialize=[*SIZES, "room", "lists", "segments", "num_slots"])
def add_up(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    part,
    room,
    lists,
    segments,
    pointers,
    any_cache,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_vn,
    stride_vs,
    stride_vh,
    offsets,
    pages,
    num_slots,
    KH: tl.constexpr,
    BS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sums of one segment of the candidates of one (eviction, layer, head)."""
    layer, head, entry, _, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, part, KH, BS
    )  # fmt: skip
    segment, segments = tl.program_id(1), segments_of(entry, segments, BS)
    if segment >= segments:
        return
    ops = tl.load(entry + 2)
    total = tl.load(entry + 1) * BS
    first, count = None, None
    if pages is not None:
        pages += layer * num_blocks * KH
        first, count = known_lanes(entry, offsets, layer, num_slots, head, KH)
        total += (count - tl.load(entry)) * BS
    sums = staged + lists * room + segment * 2 * DP + tl.arange(0, DP)
    if (ops & _KEY) != 0:
        keys = cache_at(pointers + layer, any_cache) + head * stride_kh
        found = _sum(keys, entry, pages, first, count, segment * TILE, total, segments * TILE, head,
                     stride_kn, stride_ks, stride_kh, True, KH, BS, D, DP, TILE)  # fmt: skip
        tl.store(sums, found)
    if (ops & _VALUE) != 0:
        values = cache_at(pointers + num_layers + layer, any_cache) + head * stride_vh
        found = _sum(values, entry, pages, first, count, segment * TILE, total, segments * TILE, head,
                     stride_vn, stride_vs, stride_vh, False, KH, BS, D, DP, TILE)  # fmt: skip
        tl.store(sums + DP, found)
