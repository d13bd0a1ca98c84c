# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Evictions of a step if KV heads share slots: steps 4 to 6 of :mod:`h2o_vllm.kernels.lanes`.

:mod:`.share` assigns lanes to each head. Then each head ranks its own candidates, takes the lanes that other
heads give up, and lists its moves. The source of one head's move may be the target of another's, but only in
one direction. A head that gives up lanes moves their best tokens to the lanes that it keeps. A head that
gains lanes fills them from doomed blocks. So heads that gain no lane move first, and no token needs a
temporary copy.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.compact import copy_moves
from h2o_vllm.kernels.triton.evictions import KVLayers, SharedEvictions
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.share import (
    SIZES,
    field,
    list_lanes,
    of_place,
    share_lanes,
    unit_words,
)
from h2o_vllm.kernels.triton.survivors import list_moves

__all__ = ["compact_shared"]

_CHUNK = 1024
"""Most candidates, or pages, that a program reads once; more are read again for each of the 32 bits."""
_MOVES = 16
_MOVERS = 8
"""As in :mod:`.compact`."""


def compact_shared(
    layers: KVLayers, scores: Tensor, lanes: LaneTables, evictions: SharedEvictions
) -> None:
    """Assign the lanes of a step's heavy blocks again, and move the survivors and their scores. Eager.

    The result equals that of :func:`h2o_vllm.kernels.lanes.compact_shared`: lanes, survivors and their slots.
    Doomed blocks are only read, and no block is freed.

    Args:
        layers: the KV of all layers, and the scratch. scores: [L, N, KH, BS], float32, contiguous.
        lanes: updated for the evictions' requests.
        evictions: a heavy block of one is in no other, neither as heavy nor as doomed.

    Raises:
        ValueError: one layer of one eviction does not fit the scratch.
    """
    num_layers, num_blocks, heads, block_size = scores.shape
    units = evictions.blocks.shape[0] * num_layers
    if units == 0:
        return
    width = evictions.blocks.shape[1]
    room = unit_words(width, evictions.max_heavy, heads, block_size)
    # In 32-bit words. Aligned to moves, which take two words.
    scratch = layers.moves.view(-1)
    step = min(units, scratch.numel() // room)
    if step == 0:
        raise ValueError(f"an eviction's {4 * room} bytes do not fit {layers.nbytes} bytes")
    row_words, strides = layers.key_caches[0].shape[3] // layers.words, layers.word_strides
    told, form = (evictions.blocks, evictions.counts), (heads, block_size)
    lists = {"KH": heads, "CHUNK": _CHUNK, "num_warps": 4}
    each = {
        "KH": heads,
        "KHP": triton.next_power_of_2(heads),
        "BS": block_size,
        "CHUNK": _CHUNK,
        "num_warps": 8,
        # Without this, ptxas uses fewer registers on sm_80 and sm_100, and spills.
        "maxnreg": 128,
    }
    moves = {
        "KH": heads, "KHP": each["KHP"], "BS": block_size, "WORDS": row_words,
        "WORDS_P": triton.next_power_of_2(row_words), "MOVES": _MOVES, "MOVERS": _MOVERS, "num_warps": 4,
    }  # fmt: skip
    for first in range(0, units, step):
        now = min(step, units - first)
        sizes = (
            scratch,
            first,
            num_layers,
            num_blocks,
            evictions.blocks.stride(0),
            evictions.counts.stride(0),
            width * heads,
            room,
        )
        launch(list_lanes, (now, heads), heads, (*told, lanes.owners, *sizes), lists)
        given: tuple[Any, ...] = (*told, lanes.offsets, lanes.offsets.shape[1], scores, *sizes)
        launch(share_lanes, (now,), form, given, each)
        given = (*told, lanes.owners, lanes.pages, scores, *sizes)
        launch(_select_shared, (now, heads), form, given, each)
        for gaining in (0, 1):
            given = (*told, layers.pointers, scores, *sizes, gaining, *strides)
            launch(_move_shared, (now, heads, _MOVERS), (strides, *moves.values()), given, moves)


@triton.jit
def _my_moves(mine, pages_room, head, KH: tl.constexpr, KHP: tl.constexpr, BS: tl.constexpr):
    """Pointer to a head's list of moves, and the number of entries before its own in the lists of pages."""
    heads = tl.arange(0, KHP)
    lanes = tl.load(field(mine, pages_room, 3, KH) + heads, mask=heads < head, other=0)
    before = tl.sum(lanes, 0)
    words = pages_room + 5 * KH
    return mine + words + words % 2 + before * (2 * BS), before


@triton.jit(do_not_specialize=SIZES)
def _select_shared(
    blocks,
    counts,
    owners,
    pages,
    scores,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_blocks,
    stride_counts,
    pages_room,
    unit_room,
    KH: tl.constexpr,
    KHP: tl.constexpr,
    BS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the lanes and the moves of one head of one layer."""
    head = tl.program_id(1)
    layer, my_blocks, _heavy, _doomed, _slot, mine = of_place(
        blocks, counts, scratch, tl.program_id(0), first_unit, num_layers, stride_blocks, stride_counts,
        unit_room,
    )  # fmt: skip
    my_scores = scores + layer * num_blocks * KH * BS
    my_owners = owners + layer * num_blocks * KH
    my_pages = pages + layer * num_blocks * KH
    moves, entries = _my_moves(mine, pages_room, head, KH, KHP, BS)
    listed = mine + tl.load(field(mine, pages_room, 0, KH) + head)
    total = tl.load(field(mine, pages_room, 1, KH) + head) * BS
    lanes = tl.load(field(mine, pages_room, 3, KH) + head)
    keeps = tl.minimum(tl.load(field(mine, pages_room, 2, KH) + head), lanes)
    kept = keeps * BS
    leavers, takers = list_moves(
        my_scores, listed, lanes * BS, total, kept, moves, 1, BS, CHUNK, ONE_CHUNK=False
    )
    tl.store(field(mine, pages_room, 4, KH) + head, leavers)

    for at in range(0, keeps, CHUNK):
        index = at + tl.arange(0, CHUNK)
        page = tl.load(listed + index, mask=index < keeps, other=0)
        _take(my_blocks, my_owners, my_pages, entries + index, page, head, index < keeps, KH)
    # Lanes that heads give up and lanes that heads gain are both numbered; equal numbers are matched.
    heads = tl.arange(0, KHP)
    all_lanes = tl.load(field(mine, pages_room, 3, KH) + heads, mask=heads < KH, other=0)
    all_owned = tl.load(field(mine, pages_room, 2, KH) + heads, mask=heads < KH, other=0)
    wanted = tl.maximum(all_lanes - all_owned, 0)
    first_wanted = tl.sum(tl.where(heads < head, wanted, 0), 0)
    end_wanted = first_wanted + lanes - keeps
    first_given_up = 0
    for other in range(KH):
        begin = tl.load(field(mine, pages_room, 0, KH) + other)
        owned = tl.load(field(mine, pages_room, 2, KH) + other)
        still = tl.minimum(tl.load(field(mine, pages_room, 3, KH) + other), owned)
        end_given_up = first_given_up + owned - still
        first = tl.maximum(first_wanted, first_given_up)
        end = tl.minimum(end_wanted, end_given_up)
        # Slot by slot, as each slot is also a target.
        for at in range(first * BS, end * BS, CHUNK):
            place = at + tl.arange(0, CHUNK)
            live = place < end * BS
            number = place // BS
            page = tl.load(mine + begin + still + number - first_given_up, mask=live, other=0)
            target = takers + place - first_wanted * BS
            tl.store(moves + target * 2 + 1, page * BS + place % BS, mask=live)
            entry = entries + keeps + number - first_wanted
            new = live & (place % BS == 0)
            _take(my_blocks, my_owners, my_pages, entry, page, head, new, KH)
        first_given_up = end_given_up


@triton.jit
def _take(my_blocks, my_owners, my_pages, entry, page, head, live, KH: tl.constexpr):
    """Assign pages to a head, at some entries of the request's list."""
    block = tl.load(my_blocks + entry // KH, mask=live, other=0)
    block = tl.where(block < 0, -1 - block, block)
    tl.store(my_pages + block * KH + entry % KH, page, mask=live)
    tl.store(my_owners + page, tl.zeros_like(page).to(tl.int16) + head.to(tl.int16), mask=live)


@triton.jit(do_not_specialize=[*SIZES, "gaining"])
def _move_shared(
    blocks,
    counts,
    pointers,
    scores,
    scratch,
    first_unit,
    num_layers,
    num_blocks,
    stride_blocks,
    stride_counts,
    pages_room,
    unit_room,
    gaining,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_vn,
    stride_vs,
    stride_vh,
    KH: tl.constexpr,
    KHP: tl.constexpr,
    BS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P: tl.constexpr,
    MOVES: tl.constexpr,
    MOVERS: tl.constexpr,
):
    """Copy K, V and score of every MOVERS-th group of moves of one head.

    One launch serves the heads that gain lanes, another one the others.
    """
    head = tl.program_id(1)
    layer, _blocks, _heavy, _doomed, _slot, mine = of_place(
        blocks, counts, scratch, tl.program_id(0), first_unit, num_layers, stride_blocks, stride_counts,
        unit_room,
    )  # fmt: skip
    gains = tl.load(field(mine, pages_room, 3, KH) + head) > tl.load(
        field(mine, pages_room, 2, KH) + head
    )
    if gains != (gaining != 0):
        return
    moves, _entries = _my_moves(mine, pages_room, head, KH, KHP, BS)
    count = tl.load(field(mine, pages_room, 4, KH) + head)
    keys = tl.load(pointers + layer).to(tl.pointer_type(tl.int64))
    values = tl.load(pointers + num_layers + layer).to(tl.pointer_type(tl.int64))
    copy_moves(
        keys, values, scores + layer * num_blocks * KH * BS, moves, count,
        stride_kn, stride_ks, stride_kh, stride_vn, stride_vs, stride_vh,
        KH, KH, BS, WORDS, WORDS_P, MOVES, MOVERS,
    )  # fmt: skip
