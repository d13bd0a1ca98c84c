# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""New scores for the candidates of a step's evictions, in all layers and heads at once.

:mod:`h2o_vllm.policy.formulas` defines the scores in plain torch, one eviction at a time. This computes the
same for all evictions of a step. It takes one launch; another one if there are many candidates
(:mod:`.sums`); another one with a calibration (:mod:`.predict`); and up to three if an eviction joins ranks,
pools neighbours or uses a mean. Such evictions write to the scratch first (:mod:`.ranks`), as a score must
not change while other programs read it.
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
    segments_of,
)
from h2o_vllm.kernels.triton.evictions import KVLayers
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.predict import Prediction, add_predicted
from h2o_vllm.kernels.triton.ranks import order_ranks
from h2o_vllm.kernels.triton.sums import (
    add_up,
    cache_at,
    distance_from,
    inverse_length,
    sum_of,
    vectors,
    vectors_of_any,
)
from h2o_vllm.policy.ranks import Op

__all__ = ["rescore"]

_PREDICTED = tl.constexpr(int(Op.PREDICTED))
_ATTENTION = tl.constexpr(int(Op.ATTENTION))
_MEAN = tl.constexpr(int(Op.MEAN))
_VALUE = tl.constexpr(int(Op.VALUE))
_END = tl.constexpr(int(Op.END))
_KEY = tl.constexpr(int(Op.KEY))
_RANDOM = tl.constexpr(int(Op.RANDOM))
_OF_ALL_ATTENTION = tl.constexpr(int(Op.ATTENTION | Op.MEAN | Op.VALUE))
_REACH = tl.constexpr(3)
_SINKS, _MOST = tl.constexpr(4), tl.constexpr(2.0)
_NEWER = tl.constexpr(2.0**-17)
"""As in :mod:`h2o_vllm.policy.formulas`; ``_REACH`` is half of ``POOLED``."""


def rescore(
    layers: KVLayers,
    scores: Tensor,
    early: Tensor,
    rescores: told.Rescores,
    lanes: LaneTables | None = None,
    prediction: Prediction | None = None,
) -> None:
    """Adjust the scores of a step's candidates, in place. Eager, before :func:`.compact`.

    The result equals that of :func:`h2o_vllm.policy.formulas.new_scores`, except that keys and values are
    summed in another order.

    Args:
        layers: the KV of all layers, and the scratch. scores: [L, N, KH, BS], float32, contiguous.
        early: [L, N, KH, BS]: the part of the scores that does not come from late queries.
        rescores: the evictions; no block is in two of them.
        lanes: the owners of lanes; given if a request in ``rescores`` has shared slots.
        prediction: the calibration, or ``None``: then no eviction uses the rank ``predicted``.

    Raises:
        ValueError: one layer of one eviction does not fit the scratch.
    """
    num_layers, num_blocks, heads, block_size = scores.shape
    units = rescores.table.shape[0] * num_layers
    if units == 0:
        return
    room = rescores.max_staged * block_size
    key, value = layers.key_caches[0], layers.value_caches[0]
    padded = triton.next_power_of_2(key.shape[3])
    tokens = (rescores.table.shape[1] - told.HEADER) * block_size
    segments = max(1, min(told.MOST_SEGMENTS, tokens // told.SEGMENT))
    lists = told.lists_of(rescores.ranks)
    part = room * lists + told.sums_of(segments, padded)
    of_heads = 0 if prediction is None else prediction.of_heads
    assert prediction is not None or not rescores.predicts
    # The first sum of a prediction is aligned to 16 bytes.
    numbers = layers.moves.numel() - (4 if of_heads else 0)
    step = min(units, numbers // (heads * part + of_heads * room))
    if step == 0:
        raise ValueError(f"scores of {heads} x {room} tokens do not fit {layers.nbytes} bytes")
    # The scratch of moves, which is unused until compaction.
    scratch = layers.moves.view(torch.float32)
    shared: tuple[Tensor | None, Tensor | None, int | None] = (None, None, None)
    if rescores.shares:
        assert lanes is not None
        shared = (lanes.offsets, lanes.pages, lanes.offsets.shape[1])
    caches = (layers.pointers, key, *key.stride()[:3], *value.stride()[:3])
    sizes = {"KH": heads, "BS": block_size, "num_warps": 4}
    # A tile takes 64 registers of 128 threads.
    wide = {"D": key.shape[3], "DP": padded, "TILE": 8192 // padded}
    form = (heads, block_size, key.shape[3], key.dtype, caches[2:], rescores.shares)
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
            part,
        )
        divided = (room, lists, segments)
        if segments > 1:
            told_of = (*given, *divided, *caches, *shared)
            launch(add_up, (programs, segments), form, told_of, {**wide, **sizes})
        of_prediction: tuple[int | None, ...] = (None, None, None)
        if prediction is not None:
            behind = triton.cdiv(programs * part, 4) * 4
            of_prediction = (behind, prediction.first, of_heads)
            if rescores.predicts:
                add_predicted(
                    programs // heads, room, given, caches, prediction, behind,
                    KH=heads, BS=block_size, D=key.shape[3],
                )  # fmt: skip
        told_of = (*given, *divided, early, *of_prediction, *caches, *shared)
        constants = {**wide, "ALONE": segments == 1, **sizes}
        form_of_all = (form, segments == 1, prediction is None)
        launch(_rescore, (programs, segments), form_of_all, told_of, constants)
        if room:
            order_ranks(programs, room, rescores.ranks, segments, given, **sizes)


@triton.jit
def _highest_nearby(my_scores, my_early, by_late, entry, candidate, known, total,
                    KH: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[TILE]: the highest score, or late part of it, of the fresh tokens around each, itself included."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for away in range(-_REACH, _REACH + 1):
        other = candidate + away
        there = (candidate < total) & (other >= known) & (other < total)
        block, slot = place_of(entry, other, there, BS)
        score = scores_of(my_scores, block, slot, there, KH, BS)
        if by_late:
            at = my_early + block * (KH * BS) + slot
            score -= tl.load(at, mask=there, other=0.0)
        highest = tl.where(there, tl.maximum(highest, score), highest)
    return highest


@triton.jit
def _mixed(bits):
    """MurmurHash3's finaliser for uint32."""
    bits = tl.mul(bits ^ (bits >> 16), 0x85EBCA6B, sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return bits ^ (bits >> 16)


@triton.jit
def _draws(layer, head, seen, candidate):
    """[TILE]: :func:`h2o_vllm.policy.formulas.random`; ``head``: its number in the model."""
    place = candidate.to(tl.uint32)
    unit = place * 0 + ((layer << 16) + head).to(tl.uint32)
    seed = _mixed(_mixed(unit) ^ seen.to(tl.uint32))
    steps = tl.mul(place, 0x9E3779B9, sanitize_overflow=False)
    return (_mixed(tl.add(seed, steps, sanitize_overflow=False)) >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def _predicted(sums, position, live):
    """[TILE]: :func:`h2o_vllm.policy.formulas.predicted`, from the sums at ``sums``."""
    found = tl.load(sums, mask=live, other=0.0)
    given = tl.exp(tl.minimum(tl.maximum(found, -50.0), 0.0))
    return tl.where(position < _SINKS, _MOST, given) * tl.exp(position.to(tl.float32) * _NEWER)


@triton.jit(
    do_not_specialize=[
        *SIZES, "room", "lists", "segments", "num_slots", "behind", "first_of", "of_heads"
    ]
)  # fmt: skip
def _rescore(  # noqa: PLR0912, PLR0915 - one kernel, in the order of what it does
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
    early,
    behind,
    first_of,
    of_heads,
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
    ALONE: tl.constexpr,
):
    """A segment of one (eviction, layer, head)'s candidates. ``any_cache`` has the dtype of the caches."""
    layer, head, entry, my_scores, staged = my_part(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, part, KH, BS
    )  # fmt: skip
    segments = segments_of(entry, segments, BS)
    if tl.program_id(1) >= segments:
        return
    start, step = tl.program_id(1) * TILE, segments * TILE
    sums = staged + lists * room
    known = tl.load(entry) * BS
    total = tl.load(entry + 1) * BS
    ops = tl.load(entry + 2)
    fresh_from = tl.load(entry + 3)
    seen = tl.load(entry + 4)
    only_keys = ops == _KEY
    # Without these ranks, only late attention has been collected.
    by_late = (ops & _OF_ALL_ATTENTION) != 0
    my_early = early + (layer * num_blocks * KH + head) * BS
    in_stages = ((ops & (ops - 1)) != 0) | ((ops & (_END | _VALUE)) != 0)
    # Number of all candidates, if a head has lanes of other heads. Fresh tokens are always in its own lanes.
    first, count, of_head = None, None, total
    if pages is not None:
        pages += layer * num_blocks * KH
        first, count = known_lanes(entry, offsets, layer, num_slots, head, KH)
        of_head = total - known + count * BS

    if (ops & _KEY) != 0:
        keys = cache_at(pointers + layer, any_cache) + head * stride_kh
        anchor = sum_of(keys, sums, segments, entry, pages, first, count, of_head, head, stride_kn,
                        stride_ks, stride_kh, True, ALONE, KH, BS, D, DP, TILE)  # fmt: skip
        # The direction of the mean normalised key.
        anchor /= tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-12)
        for at in range(start + tl.where(only_keys, 0, known), total, step):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = place_of(entry, candidate, live, BS)
            k = vectors(keys, block, slot, live, stride_kn, stride_ks, D, DP)
            new = tl.sum(k * anchor[None, :], 1) * -inverse_length(k)
            fresh = candidate - known
            if only_keys:
                tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)
            else:
                tl.store(staged + 2 * list_of(ops, _KEY) * room + fresh, new, mask=live)

    if behind is not None:  # noqa: SIM102 - decided at compile time
        if (ops & _PREDICTED) != 0:
            unit = (tl.program_id(0) // KH * of_heads + first_of + head).to(tl.int64)
            for at in range(start + known, total, step):
                candidate = at + tl.arange(0, TILE)
                live = candidate < total
                fresh = candidate - known
                new = _predicted(scratch + behind + unit * room + fresh, fresh_from + fresh, live)
                if in_stages:
                    # The first of ranks.
                    tl.store(staged + fresh, new, mask=live)
                else:
                    block, slot = place_of(entry, candidate, live, BS)
                    tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)

    if ops == _RANDOM:
        for at in range(start, total, step):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = place_of(entry, candidate, live, BS)
            new = _draws(layer, head + tl.load(entry + 5), seen, candidate)
            tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)

    if (ops & (_OF_ALL_ATTENTION | _END)) != 0:
        values = cache_at(pointers + num_layers + layer, any_cache) + head * stride_vh
        centre = tl.zeros([DP], tl.float32)
        distances = tl.zeros([TILE], tl.float32)
        if (ops & _VALUE) != 0:
            centre = sum_of(values, sums + DP, segments, entry, pages, first, count, of_head, head,
                            stride_vn, stride_vs, stride_vh, False, ALONE, KH, BS, D, DP, TILE)  # fmt: skip
            centre /= of_head.to(tl.float32)
            known_of_head = of_head - total + known
            for at in range(start, known_of_head, step):
                candidate = at + tl.arange(0, TILE)
                live = candidate < known_of_head
                v = vectors_of_any(values, entry, pages, first, count, candidate, live, head, stride_vn,
                                   stride_vs, stride_vh, KH, BS, D, DP)  # fmt: skip
                distances += tl.where(live, distance_from(centre, v), 0.0)
        for at in range(start + known, total, step):
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
            # Divided as torch divides a number by a tensor. Candidates come before the newest query.
            queries = tl.where(live, seen - fresh_from - fresh, 1).to(tl.float32)
            new *= tl.div_rn(1.0, queries) * seen.to(tl.float32)
            if ((ops & _MEAN) != 0) & in_stages:
                tl.store(staged + 2 * list_of(ops, _MEAN) * room + fresh, new, mask=live)
            if (ops & _VALUE) != 0:
                v = vectors(values, block, slot, live, stride_vn, stride_vs, D, DP)
                distance = distance_from(centre, v)
                distances += tl.where(live, distance, 0.0)
                # Divided by the mean distance, which is known when all distances are.
                new *= distance
                tl.store(staged + 2 * list_of(ops, _VALUE) * room + fresh, new, mask=live)
            if in_stages == 0:
                at_slot = my_scores + block * (KH * BS) + slot
                tl.store(at_slot, new, mask=live)
        if (ops & _VALUE) != 0:
            mean = tl.sum(distances, 0) / of_head.to(tl.float32)
            tl.store(staged + part - 1 - tl.program_id(1), mean)
