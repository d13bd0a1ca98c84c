# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""New scores for what a step's evictions are about to rank, in all layers and heads at once.

Policies say in plain torch what they make of their scores, eviction by eviction; this is the same for all
evictions of a step. One launch, or three if some rank in several ways or look at neighbours: these write to
the scratch first (:mod:`.ranks`), for a score may not change while others look at it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton import rescores as told
from h2o_vllm.kernels.triton.candidates import (
    SIZES,
    known_lanes,
    list_of,
    my_part,
    place_of,
    scores_of,
    shared_place_of,
)
from h2o_vllm.kernels.triton.evictions import KVLayers
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.ranks import order_ranks, settle_scores
from h2o_vllm.policy.ranks import Op

__all__ = ["rescore"]

_ATTENTION = tl.constexpr(int(Op.ATTENTION))
_MEAN = tl.constexpr(int(Op.MEAN))
_VALUE = tl.constexpr(int(Op.VALUE))
_END = tl.constexpr(int(Op.END))
_KEY = tl.constexpr(int(Op.KEY))
_RANDOM = tl.constexpr(int(Op.RANDOM))
_OF_ALL_ATTENTION = tl.constexpr(int(Op.ATTENTION | Op.MEAN | Op.VALUE))
_TINY = tl.constexpr(1e-20)
_NEARER = tl.constexpr(2.0**-18)
_REACH = tl.constexpr(3)
"""As in :mod:`h2o_vllm.policy.formulas`; ``_REACH`` is half of ``POOLED``."""
_ROWS = 64
_COLUMNS = 64
"""Tokens that one program ranks, and those it compares them with at a time."""
_TILE = 1024
"""Tokens whose scores one program writes back from the scratch."""


def rescore(
    layers: KVLayers,
    scores: Tensor,
    early: Tensor,
    rescores: told.Rescores,
    lanes: LaneTables | None = None,
) -> None:
    """Adjust the scores of a step's candidates, in place. Eager, before :func:`.compact`.

    As :func:`h2o_vllm.policy.formulas.new_scores`, up to the order in which keys and values are added up.

    Args:
        layers: see there; the scratch is used. scores: [L, N, KH, BS], float32, contiguous.
        early: the same: how much of them is not of late queries.
        rescores: no block is in two of them.
        lanes: given if any of them shares; whose the lanes of its known blocks are.

    Raises:
        ValueError: one layer of one eviction does not fit the scratch.
    """
    num_layers, num_blocks, heads, block_size = scores.shape
    units = rescores.table.shape[0] * num_layers
    if units == 0:
        return
    room = rescores.max_staged * block_size
    step = units
    if room:
        step = min(units, layers.moves.numel() // (heads * rescores.lists * room))
    if step == 0:
        raise ValueError(f"scores of {heads} x {room} tokens do not fit {layers.nbytes} bytes")
    key, value = layers.key_caches[0], layers.value_caches[0]
    padded = triton.next_power_of_2(key.shape[3])
    # Idle until compaction.
    scratch = layers.moves.view(torch.float32)
    shared: tuple[Tensor | None, Tensor | None, int | None] = (None, None, None)
    if rescores.shares:
        assert lanes is not None
        shared = (lanes.offsets, lanes.pages, lanes.offsets.shape[1])
    for first in range(0, units, step):
        programs = min(step, units - first) * heads
        given = (
            scores,
            rescores.table,
            scratch,
            first,
            num_layers,
            num_blocks,
            rescores.table.stride(0),
            room,
            rescores.lists,
        )
        sizes = {"KH": heads, "BS": block_size, "num_warps": 4}
        _rescore[(programs,)](
            *given,
            early,
            layers.pointers,
            key,
            *key.stride()[:3],
            *value.stride()[:3],
            *shared,
            D=key.shape[3],
            DP=padded,
            # A tile is 64 registers of 128 threads.
            TILE=8192 // padded,
            **sizes,
        )
        if room:
            order_ranks[(programs, triton.cdiv(room, _ROWS))](
                *given, ROWS=_ROWS, COLUMNS=_COLUMNS, **sizes
            )
            settle_scores[(programs, triton.cdiv(room, _TILE))](*given, TILE=_TILE, **sizes)


@triton.jit
def _cache(pointer, any_cache):
    """A layer's keys or values; elements as in ``any_cache``. ``checks.check_layers``: aligned to 8 bytes."""
    return tl.multiple_of(tl.load(pointer).to(any_cache.dtype), 8)


@triton.jit
def _vectors(cache, block, slot, live, stride_n, stride_s, D: tl.constexpr, DP: tl.constexpr):
    """Keys or values of one head, [TILE, DP], float32; zeros beyond the head size and where nothing lives."""
    return _vectors_at(cache, block * stride_n + slot * stride_s, live, D, DP)


@triton.jit
def _vectors_at(cache, at, live, D: tl.constexpr, DP: tl.constexpr):
    wide = tl.arange(0, DP)[None, :]
    mask = live[:, None] & (wide < D)
    return tl.load(cache + at[:, None] + wide, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _any_vectors(cache, entry, pages, first, count, candidate, live, head, stride_n, stride_s, stride_h,
                 KH: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """As :func:`_vectors`, of any candidates of a head, which may have lanes of others."""
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
def _inverse_length(keys):
    """[TILE]: one over the length of each."""
    return tl.rsqrt(tl.maximum(tl.sum(keys * keys, 1), _TINY))


@triton.jit
def _anchor(keys, entry, pages, first, count, total, head, stride_n, stride_s, stride_h, KH: tl.constexpr,
            BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[DP]: the direction of the mean of the normalised keys."""
    sums = tl.zeros([TILE, DP], tl.float32)
    for at in range(0, total, TILE):
        candidate = at + tl.arange(0, TILE)
        k = _any_vectors(keys, entry, pages, first, count, candidate, candidate < total, head, stride_n,
                         stride_s, stride_h, KH, BS, D, DP)  # fmt: skip
        sums += k * _inverse_length(k)[:, None]
    anchor = tl.sum(sums, 0)
    return anchor / tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-12)


@triton.jit
def _distance(values, centre):
    """[TILE]: how far each value is from ``centre``, [DP]."""
    away = values - centre[None, :]
    return tl.sqrt(tl.sum(away * away, 1))


@triton.jit
def _centre(values, entry, pages, first, count, total, head, stride_n, stride_s, stride_h, KH: tl.constexpr,
            BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[DP]: the mean value; and the mean distance from it."""
    sums = tl.zeros([TILE, DP], tl.float32)
    for at in range(0, total, TILE):
        candidate = at + tl.arange(0, TILE)
        sums += _any_vectors(values, entry, pages, first, count, candidate, candidate < total, head, stride_n,
                             stride_s, stride_h, KH, BS, D, DP)  # fmt: skip
    centre = tl.sum(sums, 0) / total.to(tl.float32)
    distances = tl.zeros([TILE], tl.float32)
    for at in range(0, total, TILE):
        candidate = at + tl.arange(0, TILE)
        v = _any_vectors(values, entry, pages, first, count, candidate, candidate < total, head, stride_n,
                         stride_s, stride_h, KH, BS, D, DP)  # fmt: skip
        distances += tl.where(candidate < total, _distance(v, centre), 0.0)
    return centre, tl.maximum(tl.sum(distances, 0) / total.to(tl.float32), _TINY)


@triton.jit
def _highest_nearby(my_scores, my_early, by_late, entry, candidate, known, total,
                    KH: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[TILE]: the highest score, or late part of one, of the fresh tokens around each, itself included.

    Those of others count a little less with each step away from them.
    """
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for away in range(-_REACH, _REACH + 1):
        other = candidate + away
        there = (candidate < total) & (other >= known) & (other < total)
        block, slot = place_of(entry, other, there, BS)
        score = scores_of(my_scores, block, slot, there, KH, BS)
        if by_late:
            at = my_early + block * (KH * BS) + slot
            score -= tl.load(at, mask=there, other=0.0)
        offset = other - candidate
        steps = tl.maximum(2 * offset, -2 * offset - 1)
        score *= 1.0 - steps.to(tl.float32) * _NEARER
        highest = tl.where(there, tl.maximum(highest, score), highest)
    return highest


@triton.jit
def _mixed(bits):
    """MurmurHash3's finaliser, uint32."""
    bits = tl.mul(bits ^ (bits >> 16), 0x85EBCA6B, sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return bits ^ (bits >> 16)


@triton.jit
def _draws(layer, head, seen, candidate):
    """[TILE]: :func:`h2o_vllm.policy.formulas.random`; ``head``: of the model."""
    place = candidate.to(tl.uint32)
    unit = place * 0 + ((layer << 16) + head).to(tl.uint32)
    seed = _mixed(_mixed(unit) ^ seen.to(tl.uint32))
    steps = tl.mul(place, 0x9E3779B9, sanitize_overflow=False)
    return (_mixed(tl.add(seed, steps, sanitize_overflow=False)) >> 8).to(tl.float32) * 2.0**-24


@triton.jit(do_not_specialize=[*SIZES, "num_slots"])
def _rescore(  # noqa: PLR0912, PLR0915 - one kernel, in the order of what it does
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    room,
    lists,
    early,
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
    """The candidates of one (eviction, layer, head). ``any_cache`` says how elements are stored."""
    layer, head, entry, my_scores, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, lists, KH, BS
    )  # fmt: skip
    known = tl.load(entry) * BS
    total = tl.load(entry + 1) * BS
    ops = tl.load(entry + 2)
    fresh_from = tl.load(entry + 3)
    seen = tl.load(entry + 4)
    only_keys = ops == _KEY
    # Else nothing but late attention has been collected.
    by_late = (ops & _OF_ALL_ATTENTION) != 0
    my_early = early + (layer * num_blocks * KH + head) * BS
    in_stages = ((ops & (ops - 1)) != 0) | (ops == _END)
    # Of all candidates, where a head has other lanes than its own; the fresh ones are its own in any case.
    first, count, of_head = None, None, total
    if pages is not None:
        pages += layer * num_blocks * KH
        first, count = known_lanes(entry, offsets, layer, num_slots, head, KH)
        of_head = total - known + count * BS

    if (ops & _KEY) != 0:
        keys = _cache(pointers + layer, any_cache) + head * stride_kh
        anchor = _anchor(keys, entry, pages, first, count, of_head, head, stride_kn, stride_ks, stride_kh, KH,
                         BS, D, DP, TILE)  # fmt: skip
        for at in range(tl.where(only_keys, 0, known), total, TILE):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = place_of(entry, candidate, live, BS)
            k = _vectors(keys, block, slot, live, stride_kn, stride_ks, D, DP)
            new = tl.sum(k * anchor[None, :], 1) * -_inverse_length(k)
            fresh = candidate - known
            if only_keys:
                tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)
            else:
                tl.store(staged + 2 * list_of(ops, _KEY) * room + fresh, new, mask=live)

    if ops == _RANDOM:
        for at in range(0, total, TILE):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = place_of(entry, candidate, live, BS)
            new = _draws(layer, head + tl.load(entry + 5), seen, candidate)
            tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)

    if (ops & (_OF_ALL_ATTENTION | _END)) != 0:
        values = _cache(pointers + num_layers + layer, any_cache) + head * stride_vh
        centre = tl.zeros([DP], tl.float32)
        mean_distance = tl.full([], 1.0, tl.float32)
        if (ops & _VALUE) != 0:
            centre, mean_distance = _centre(values, entry, pages, first, count, of_head, head, stride_vn,
                                            stride_vs, stride_vh, KH, BS, D, DP, TILE)  # fmt: skip
        for at in range(known, total, TILE):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = place_of(entry, candidate, live, BS)
            new = scores_of(my_scores, block, slot, live, KH, BS)
            fresh = candidate - known
            if (ops & _END) != 0:
                nearby = _highest_nearby(
                    my_scores, my_early, by_late, entry, candidate, known, total, KH, BS, TILE
                )  # fmt: skip
                tl.store(staged + 2 * list_of(ops, _END) * room + fresh, nearby, mask=live)
            if (ops & _ATTENTION) != 0:
                tl.store(staged + 2 * list_of(ops, _ATTENTION) * room + fresh, new, mask=live)
            # Divided as torch divides a number by a tensor. Candidates lie before the newest query.
            queries = tl.where(live, seen - fresh_from - fresh, 1).to(tl.float32)
            new *= tl.div_rn(1.0, queries) * seen.to(tl.float32)
            if ((ops & _MEAN) != 0) & in_stages:
                tl.store(staged + 2 * list_of(ops, _MEAN) * room + fresh, new, mask=live)
            if (ops & _VALUE) != 0:
                v = _vectors(values, block, slot, live, stride_vn, stride_vs, D, DP)
                new *= _distance(v, centre) / mean_distance
                if in_stages:
                    tl.store(staged + 2 * list_of(ops, _VALUE) * room + fresh, new, mask=live)
            if in_stages == 0:
                at_slot = my_scores + block * (KH * BS) + slot
                tl.store(at_slot, new, mask=live)
