# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""New scores for what a step's evictions are about to rank, in all layers and heads at once.

Policies say in plain torch what they make of their scores, eviction by eviction; this is the same for all
evictions of a step. One launch, or three if some rank in two ways or look at neighbours: these write to the
scratch first, for a score may not change while others look at it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton import rescores as told
from h2o_vllm.kernels.triton.evictions import KVLayers

__all__ = ["rescore"]

_PER_QUERY = tl.constexpr(told.PER_QUERY)
_BY_VALUES = tl.constexpr(told.BY_VALUES)
_BY_KEYS = tl.constexpr(told.BY_KEYS)
_BY_RANKS = tl.constexpr(told.BY_RANKS)
_HEADER = tl.constexpr(told.HEADER)
_LISTS = tl.constexpr(4)
"""Numbers in the scratch per fresh token: its sum, its score by keys, the sums in order, its rank by keys."""
_TINY = tl.constexpr(1e-20)
"""As in the policies."""
_ROWS = 64
_COLUMNS = 64
"""Tokens that one program ranks, and those it compares them with at a time."""
_TILE = 1024
"""Tokens whose scores one program writes back from the scratch."""


def rescore(layers: KVLayers, scores: Tensor, rescores: told.Rescores) -> None:
    """Adjust the scores of a step's candidates, in place. Eager, before :func:`.compact`.

    As the policies' ``eviction_scores`` would, up to the order in which keys and values are added up.
    Protected tokens keep infinite scores.

    Args:
        layers: see there; the scratch is used. scores: [L, N, KH, BS], float32, contiguous.
        rescores: no block is in two of them.

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
        step = min(units, layers.moves.numel() // (heads * _LISTS.value * room))
    if step == 0:
        raise ValueError(f"scores of {heads} x {room} tokens do not fit {layers.nbytes} bytes")
    key, value = layers.key_caches[0], layers.value_caches[0]
    padded = triton.next_power_of_2(key.shape[3])
    # Idle until compaction.
    scratch = layers.moves.view(torch.float32)
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
        )
        sizes = {"KH": heads, "BS": block_size, "num_warps": 4}
        _rescore[(programs,)](
            *given,
            layers.pointers,
            key,
            *key.stride()[:3],
            *value.stride()[:3],
            D=key.shape[3],
            DP=padded,
            # A tile is 64 registers of 128 threads.
            TILE=8192 // padded,
            **sizes,
        )
        if room:
            _order[(programs, triton.cdiv(room, _ROWS))](
                *given, ROWS=_ROWS, COLUMNS=_COLUMNS, **sizes
            )
            _settle[(programs, triton.cdiv(room, _TILE))](*given, TILE=_TILE, **sizes)


@triton.jit
def _mine(scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room,
          KH: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Of this program: layer, head, its eviction's entry, its scores, its part of the scratch."""
    # Heads side by side: their KV is.
    head = (tl.program_id(0) % KH).to(tl.int64)
    unit = first_unit + tl.program_id(0) // KH
    layer = (unit % num_layers).to(tl.int64)
    entry = table + (unit // num_layers).to(tl.int64) * stride_table
    my_scores = scores + (layer * num_blocks * KH + head) * BS
    staged = scratch + tl.program_id(0).to(tl.int64) * room * _LISTS
    return layer, head, entry, my_scores, staged


@triton.jit
def _locate(entry, candidate, live, BS: tl.constexpr):
    """Block id, 64 bits, and slot in the block of each candidate."""
    block = tl.load(entry + _HEADER + candidate // BS, mask=live, other=0).to(tl.int64)
    return block, candidate % BS


@triton.jit
def _cache(pointer, any_cache):
    """A layer's keys or values; elements as in ``any_cache``. ``checks.check_layers``: aligned to 8 bytes."""
    return tl.multiple_of(tl.load(pointer).to(any_cache.dtype), 8)


@triton.jit
def _vectors(cache, block, slot, live, stride_n, stride_s, D: tl.constexpr, DP: tl.constexpr):
    """Keys or values of one head, [TILE, DP], float32; zeros beyond the head size and where nothing lives."""
    wide = tl.arange(0, DP)[None, :]
    at = (block * stride_n + slot * stride_s)[:, None] + wide
    return tl.load(cache + at, mask=live[:, None] & (wide < D), other=0.0).to(tl.float32)


@triton.jit
def _inverse_length(keys):
    """[TILE]: one over the length of each."""
    return tl.rsqrt(tl.maximum(tl.sum(keys * keys, 1), _TINY))


@triton.jit
def _anchor(keys, entry, total, stride_n, stride_s, BS: tl.constexpr, D: tl.constexpr,
            DP: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[DP]: the direction of the mean of the normalised keys."""
    sums = tl.zeros([TILE, DP], tl.float32)
    for at in range(0, total, TILE):
        candidate = at + tl.arange(0, TILE)
        block, slot = _locate(entry, candidate, candidate < total, BS)
        k = _vectors(keys, block, slot, candidate < total, stride_n, stride_s, D, DP)
        sums += k * _inverse_length(k)[:, None]
    anchor = tl.sum(sums, 0)
    return anchor / tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-12)


@triton.jit
def _distance(values, centre):
    """[TILE]: how far each value is from ``centre``, [DP]."""
    away = values - centre[None, :]
    return tl.sqrt(tl.sum(away * away, 1))


@triton.jit
def _centre(values, entry, total, stride_n, stride_s, BS: tl.constexpr, D: tl.constexpr,
            DP: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """[DP]: the mean value; and the mean distance from it."""
    sums = tl.zeros([TILE, DP], tl.float32)
    for at in range(0, total, TILE):
        candidate = at + tl.arange(0, TILE)
        block, slot = _locate(entry, candidate, candidate < total, BS)
        sums += _vectors(values, block, slot, candidate < total, stride_n, stride_s, D, DP)
    centre = tl.sum(sums, 0) / total.to(tl.float32)
    distances = tl.zeros([TILE], tl.float32)
    for at in range(0, total, TILE):
        candidate = at + tl.arange(0, TILE)
        block, slot = _locate(entry, candidate, candidate < total, BS)
        v = _vectors(values, block, slot, candidate < total, stride_n, stride_s, D, DP)
        distances += tl.where(candidate < total, _distance(v, centre), 0.0)
    return centre, tl.maximum(tl.sum(distances, 0) / total.to(tl.float32), _TINY)


@triton.jit
def _unprotected(my_scores, block, slot, live, KH: tl.constexpr, BS: tl.constexpr):
    """Scores of candidates, those of protected ones as 0; and who is protected."""
    old = tl.load(my_scores + block * (KH * BS) + slot, mask=live, other=0.0)
    protected = old == float("inf")
    return tl.where(protected, 0.0, old), protected


@triton.jit(do_not_specialize=["first_unit", "num_layers", "num_blocks", "stride_table", "room"])
def _rescore(  # noqa: PLR0915 - one kernel, in the order of what it does
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    room,
    pointers,
    any_cache,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_vn,
    stride_vs,
    stride_vh,
    KH: tl.constexpr,
    BS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The candidates of one (eviction, layer, head). ``any_cache`` says how elements are stored."""
    layer, head, entry, my_scores, staged = _mine(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, KH, BS
    )
    known = tl.load(entry) * BS
    total = tl.load(entry + 1) * BS
    how = tl.load(entry + 2)
    fresh_from = tl.load(entry + 3)
    seen = tl.load(entry + 4)
    protected = tl.load(entry + 5)
    reach = tl.load(entry + 6)
    only_keys = how == _BY_KEYS
    in_stages = (reach > 0) | ((how & _BY_RANKS) != 0)

    if (how & (_BY_KEYS | _BY_RANKS)) != 0:
        keys = _cache(pointers + layer, any_cache) + head * stride_kh
        anchor = _anchor(keys, entry, total, stride_kn, stride_ks, BS, D, DP, TILE)
        for at in range(tl.where(only_keys, 0, known), total, TILE):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = _locate(entry, candidate, live, BS)
            k = _vectors(keys, block, slot, live, stride_kn, stride_ks, D, DP)
            new = tl.sum(k * anchor[None, :], 1) * -_inverse_length(k)
            fresh = candidate - known
            if only_keys:
                # Fresh blocks from the prefix cache have scores of others: there, positions tell.
                _, infinite = _unprotected(my_scores, block, slot, live, KH, BS)
                stays = ((fresh < 0) & infinite) | ((fresh >= 0) & (fresh < protected))
                new = tl.where(stays, float("inf"), new)
                tl.store(my_scores + block * (KH * BS) + slot, new, mask=live)
            else:
                tl.store(staged + room + fresh, new, mask=live)

    if how != _BY_KEYS:
        values = _cache(pointers + num_layers + layer, any_cache) + head * stride_vh
        centre = tl.zeros([DP], tl.float32)
        mean_distance = tl.full([], 1.0, tl.float32)
        if (how & _BY_VALUES) != 0:
            centre, mean_distance = _centre(
                values, entry, total, stride_vn, stride_vs, BS, D, DP, TILE
            )
        for at in range(known, total, TILE):
            candidate = at + tl.arange(0, TILE)
            live = candidate < total
            block, slot = _locate(entry, candidate, live, BS)
            new, infinite = _unprotected(my_scores, block, slot, live, KH, BS)
            fresh = candidate - known
            for other in range(-reach, reach + 1):
                there = live & (candidate + other >= known) & (candidate + other < total)
                its_block, its_slot = _locate(entry, candidate + other, there, BS)
                near, _ = _unprotected(my_scores, its_block, its_slot, there, KH, BS)
                new = tl.where(there, tl.maximum(new, near), new)
            if (how & _PER_QUERY) != 0:
                # Divided as torch divides a number by a tensor. Candidates lie before the newest query.
                queries = tl.where(live, seen - fresh_from - fresh, 1).to(tl.float32)
                new *= tl.div_rn(1.0, queries) * seen.to(tl.float32)
            if (how & _BY_VALUES) != 0:
                v = _vectors(values, block, slot, live, stride_vn, stride_vs, D, DP)
                new *= _distance(v, centre) / mean_distance
            if in_stages:
                tl.store(staged + fresh, new, mask=live)
            else:
                at_slot = my_scores + block * (KH * BS) + slot
                tl.store(at_slot, new, mask=live & (infinite == 0))


@triton.jit(do_not_specialize=["first_unit", "num_layers", "num_blocks", "stride_table", "room"])
def _order(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    room,
    KH: tl.constexpr,
    BS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Ranks of some fresh tokens that are ranked both ways, by counting who ranks before them."""
    _, _, entry, _, staged = _mine(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, KH, BS
    )
    how = tl.load(entry + 2)
    count = (tl.load(entry + 1) - tl.load(entry)) * BS
    first = tl.program_id(1) * ROWS
    if ((how & _BY_RANKS) == 0) | (first >= count):
        return
    mine = first + tl.arange(0, ROWS)
    my_sum = tl.load(staged + mine, mask=mine < count, other=0.0)[:, None]
    my_key = tl.load(staged + room + mine, mask=mine < count, other=0.0)[:, None]
    by_sum = tl.zeros([ROWS], tl.int32)
    by_key = tl.zeros([ROWS], tl.int32)
    for at in range(0, count, COLUMNS):
        other = at + tl.arange(0, COLUMNS)
        sums = tl.load(staged + other, mask=other < count, other=0.0)[None, :]
        keys = tl.load(staged + room + other, mask=other < count, other=0.0)[None, :]
        there = (other < count)[None, :]
        earlier = other[None, :] < mine[:, None]
        before = there & ((sums > my_sum) | ((sums == my_sum) & earlier))
        by_sum += tl.sum(before.to(tl.int32), 1)
        before = there & ((keys > my_key) | ((keys == my_key) & earlier))
        by_key += tl.sum(before.to(tl.int32), 1)
    sums = tl.load(staged + mine, mask=mine < count, other=0.0)
    tl.store(staged + 2 * room + by_sum, sums, mask=mine < count)
    # Exact below 2^24.
    tl.store(staged + 3 * room + mine, by_key.to(tl.float32), mask=mine < count)


@triton.jit(do_not_specialize=["first_unit", "num_layers", "num_blocks", "stride_table", "room"])
def _settle(
    scores,
    table,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_table,
    room,
    KH: tl.constexpr,
    BS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write back the scores of some fresh tokens that went through the scratch."""
    _, _, entry, my_scores, staged = _mine(
        scores, table, scratch, first_unit, num_layers, num_blocks, stride_table, room, KH, BS
    )
    known = tl.load(entry) * BS
    count = tl.load(entry + 1) * BS - known
    how = tl.load(entry + 2)
    both = (how & _BY_RANKS) != 0
    if (both == 0) & (tl.load(entry + 6) == 0):
        return
    mine = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = mine < count
    new = tl.load(staged + mine, mask=live, other=0.0)
    if both:
        rank = tl.load(staged + 3 * room + mine, mask=live, other=0.0).to(tl.int32)
        new = tl.maximum(new, tl.load(staged + 2 * room + rank, mask=live, other=0.0))
    block, slot = _locate(entry, known + mine, live, BS)
    _, infinite = _unprotected(my_scores, block, slot, live, KH, BS)
    tl.store(my_scores + block * (KH * BS) + slot, new, mask=live & (infinite == 0))
