# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Evictions of one step: per layer and KV head, keep the tokens with the highest scores, and move their KV.

Two launches serve all layers, heads and evictions. The first one finds the lowest score that survives, per
(eviction, layer, head). It maps scores to integers of the same order, and finds the threshold bit by bit.
Then it lists the moves: which slot each moving token leaves, and which slot it takes. The second one moves
the tokens. It uses many programs, because a first eviction may move megabytes. The lists are in a scratch of
fixed size; a step that needs more takes several rounds of launches.

A head has lanes of its own. Where KV heads share slots, two launches of :mod:`.share` assign the lanes
before: steps 1 to 3 of :mod:`h2o_vllm.kernels.lanes`; steps 4 to 6 are here. Each head ranks its own
candidates, takes the lanes that other heads give up, and lists its moves. The source of one head's move may
be the target of another's, but only in one direction. A head that gives up lanes moves their best tokens to
the lanes that it keeps. A head that gains lanes fills them from doomed blocks. So heads that gain no lane
move first, in a launch of their own, and no token needs a temporary copy.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.batch import LaneTables
from h2o_vllm.kernels.triton.evictions import Evictions, KVLayers
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

CHUNKS = (1024, 4096)
"""Most candidates that one program ranks in registers, in two sizes; the smaller one takes half the warps.
More candidates are read again for each of the 32 bits. There are only two sizes because each is compiled."""
_SHARED_CHUNK = 1024
"""Most candidates, or pages, that a program reads once where heads share slots."""
_MOVES = 16
"""Tokens per step of a moving program."""
_MOVERS = 8
"""Programs that share the moves of one (eviction, layer, head)."""


def compact(
    layers: KVLayers, scores: Tensor, evictions: Evictions, lanes: LaneTables | None = None
) -> None:
    """Move the survivors of a step's evictions into their heavy blocks, with their scores. Eager.

    The result equals that of :func:`h2o_vllm.kernels.lanes.compact`: per layer and KV head the candidates
    (heavy blocks, then doomed ones) with the highest scores survive. Of equal scores the candidate with the
    lower number comes first; NaN is lowest. Survivors in heavy blocks stay in place. Doomed blocks are only
    read, and no block is freed.

    Args:
        layers: the KV of all layers, and the scratch. scores: [L, N, KH, BS], float32, contiguous.
        evictions: a heavy block of one is in no other, neither as heavy nor as doomed.
        lanes: if the requests' heads share slots. Updated: their lanes are assigned again.

    Raises:
        ValueError: one layer of one eviction does not fit the scratch.
    """
    num_layers, num_blocks, heads, block_size = scores.shape
    units = evictions.blocks.shape[0] * num_layers
    if units == 0:
        return
    shares, width = lanes is not None, evictions.blocks.shape[1]
    if shares:
        list_room = width * heads
        room = unit_words(width, evictions.max_heavy, heads, block_size)
    else:
        # Moves are limited by the number of doomed tokens and by the room in heavy blocks.
        list_room = 2 * block_size * min(evictions.max_heavy, evictions.max_doomed)
        room = heads + heads % 2 + list_room * heads
    # In 32-bit words. Aligned to moves, which take two words.
    scratch = layers.scratch
    step = min(units, scratch.numel() // room)
    if step == 0:
        raise ValueError(f"an eviction's {4 * room} bytes do not fit {scratch.nbytes} bytes")
    candidates = (evictions.max_heavy + evictions.max_doomed) * block_size
    chunk = CHUNKS[0] if candidates <= CHUNKS[0] else CHUNKS[1]
    form = {"KH": heads, "KHP": triton.next_power_of_2(heads), "BS": block_size}
    selects = form | {
        "CHUNK": _SHARED_CHUNK if shares else chunk,
        "ONE_CHUNK": not shares and candidates <= chunk,
        "SHARES": shares,
        "num_warps": 8 if shares or chunk > CHUNKS[0] else 4,
        # Without this, ptxas uses fewer registers on sm_80, sm_89 and sm_100, and spills.
        "maxnreg": 128,
    }
    row_words, strides = layers.key_caches[0].shape[3] // layers.words, layers.word_strides
    moves = form | {
        "WORDS": row_words, "WORDS_P": triton.next_power_of_2(row_words), "MOVES": _MOVES,
        "MOVERS": _MOVERS, "SHARES": shares, "num_warps": 4,
    }  # fmt: skip
    told = (evictions.blocks, evictions.counts)
    owners, pages = (None, None) if lanes is None else (lanes.owners, lanes.pages)
    for first in range(0, units, step):
        now = min(step, units - first)
        sizes: tuple[Any, ...] = (
            scratch, first, num_layers, num_blocks, evictions.blocks.stride(0), evictions.counts.stride(0),
            list_room, room,
        )  # fmt: skip
        if lanes is not None:
            lists = {"KH": heads, "CHUNK": _SHARED_CHUNK, "num_warps": 4}
            launch(list_lanes, (now, heads), heads, (*told, owners, *sizes), lists)
            given = (*told, lanes.offsets, lanes.offsets.shape[1], scores, *sizes)
            assigns = form | {"CHUNK": _SHARED_CHUNK, "num_warps": 8, "maxnreg": 128}
            launch(share_lanes, (now,), (heads, block_size), given, assigns)
        given = (*told, owners, pages, scores, *sizes)
        launch(_select, (now, heads), tuple(selects.values()), given, selects)
        for gaining in (0, 1) if shares else (0,):
            given = (*told, layers.pointers, scores, *sizes, gaining, *strides)
            launch(_move, (now, heads, _MOVERS), (strides, *moves.values()), given, moves)


@triton.jit
def _own_moves(mine, list_room, head, KH: tl.constexpr):
    """Pointer to a head's list of moves, if heads share no slots: behind a number of moves for each head."""
    return mine + KH + KH % 2 + head * list_room


@triton.jit
def _shared_moves(mine, list_room, head, KH: tl.constexpr, KHP: tl.constexpr, BS: tl.constexpr):
    """Pointer to a head's list of moves, and the number of entries before its own in the lists of pages."""
    heads = tl.arange(0, KHP)
    lanes = tl.load(field(mine, list_room, 3, KH) + heads, mask=heads < head, other=0)
    before = tl.sum(lanes, 0)
    words = list_room + 5 * KH
    return mine + words + words % 2 + before * (2 * BS), before


@triton.jit(do_not_specialize=SIZES)
def _select(
    blocks, counts, owners, pages, scores, scratch, first_unit, num_layers, num_blocks, stride_blocks,
    stride_counts, list_room, unit_room,
    KH: tl.constexpr, KHP: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """List the moves of one head of one (eviction, layer), and its lanes if heads share slots."""
    head = tl.program_id(1)
    layer, my_blocks, heavy, doomed, _slot, mine = of_place(
        blocks, counts, scratch, tl.program_id(0), first_unit, num_layers, stride_blocks, stride_counts,
        unit_room,
    )  # fmt: skip
    my_scores = scores + layer * num_blocks * KH * BS
    if SHARES:
        _select_shared(
            my_blocks, owners + layer * num_blocks * KH, pages + layer * num_blocks * KH, my_scores, mine,
            list_room, head, KH, KHP, BS, CHUNK,
        )  # fmt: skip
    else:
        keep = heavy * BS
        leavers, _takers = list_moves(
            my_scores, my_blocks, head, keep, keep + doomed * BS, keep,
            _own_moves(mine, list_room, head, KH), KH, BS, CHUNK, ONE_CHUNK,
        )  # fmt: skip
        tl.store(mine + head, leavers)


@triton.jit
def _select_shared(
    my_blocks, my_owners, my_pages, my_scores, mine, list_room, head,
    KH: tl.constexpr, KHP: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    moves, entries = _shared_moves(mine, list_room, head, KH, KHP, BS)
    listed = mine + tl.load(field(mine, list_room, 0, KH) + head)
    total = tl.load(field(mine, list_room, 1, KH) + head) * BS
    lanes = tl.load(field(mine, list_room, 3, KH) + head)
    keeps = tl.minimum(tl.load(field(mine, list_room, 2, KH) + head), lanes)
    kept = keeps * BS
    leavers, takers = list_moves(
        my_scores, listed, 0, lanes * BS, total, kept, moves, 1, BS, CHUNK, ONE_CHUNK=False
    )
    tl.store(field(mine, list_room, 4, KH) + head, leavers)

    for at in range(0, keeps, CHUNK):
        index = at + tl.arange(0, CHUNK)
        page = tl.load(listed + index, mask=index < keeps, other=0)
        _take(my_blocks, my_owners, my_pages, entries + index, page, head, index < keeps, KH)
    # Lanes that heads give up and lanes that heads gain are both numbered; equal numbers are matched.
    heads = tl.arange(0, KHP)
    all_lanes = tl.load(field(mine, list_room, 3, KH) + heads, mask=heads < KH, other=0)
    all_owned = tl.load(field(mine, list_room, 2, KH) + heads, mask=heads < KH, other=0)
    wanted = tl.maximum(all_lanes - all_owned, 0)
    first_wanted = tl.sum(tl.where(heads < head, wanted, 0), 0)
    end_wanted = first_wanted + lanes - keeps
    first_given_up = 0
    for other in range(KH):
        begin = tl.load(field(mine, list_room, 0, KH) + other)
        owned = tl.load(field(mine, list_room, 2, KH) + other)
        still = tl.minimum(tl.load(field(mine, list_room, 3, KH) + other), owned)
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
def _move(
    blocks, counts, pointers, scores, scratch, first_unit, num_layers, num_blocks, stride_blocks,
    stride_counts, list_room, unit_room, gaining,
    stride_kn, stride_ks, stride_kh, stride_vn, stride_vs, stride_vh,
    KH: tl.constexpr, KHP: tl.constexpr, BS: tl.constexpr, WORDS: tl.constexpr, WORDS_P: tl.constexpr,
    MOVES: tl.constexpr, MOVERS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Copy K, V and score of every MOVERS-th group of moves of one head of one (eviction, layer).

    If heads share slots, one launch serves those that gain lanes, another one the others.
    """
    head = tl.program_id(1)
    layer, _blocks, _heavy, _doomed, _slot, mine = of_place(
        blocks, counts, scratch, tl.program_id(0), first_unit, num_layers, stride_blocks, stride_counts,
        unit_room,
    )  # fmt: skip
    if SHARES:
        gains = tl.load(field(mine, list_room, 3, KH) + head) > tl.load(
            field(mine, list_room, 2, KH) + head
        )
        moves, _entries = _shared_moves(mine, list_room, head, KH, KHP, BS)
        count = tl.load(field(mine, list_room, 4, KH) + head)
        count = tl.where(gains == (gaining != 0), count, 0)
    else:
        moves = _own_moves(mine, list_room, head, KH)
        count = tl.load(mine + head)
    keys = tl.load(pointers + layer).to(tl.pointer_type(tl.int64))
    values = tl.load(pointers + num_layers + layer).to(tl.pointer_type(tl.int64))
    my_scores = scores + layer * num_blocks * KH * BS
    words = tl.arange(0, WORDS_P)[None, :]
    for at in range(tl.program_id(2) * MOVES, count, MOVES * MOVERS):
        index = at + tl.arange(0, MOVES)
        live = index < count
        source = tl.load(moves + index * 2, mask=live, other=0)
        target = tl.load(moves + index * 2 + 1, mask=live, other=0)
        from_block, from_lane = (source // (KH * BS)).to(tl.int64), source // BS % KH
        to_block, to_lane = (target // (KH * BS)).to(tl.int64), target // BS % KH
        from_slot, to_slot = source % BS, target % BS
        both = live[:, None] & (words < WORDS)
        from_key = from_block * stride_kn + from_lane * stride_kh + from_slot * stride_ks
        from_value = from_block * stride_vn + from_lane * stride_vh + from_slot * stride_vs
        k = tl.load(keys + from_key[:, None] + words, mask=both)
        v = tl.load(values + from_value[:, None] + words, mask=both)
        score = tl.load(my_scores + source, mask=live)
        to_key = to_block * stride_kn + to_lane * stride_kh + to_slot * stride_ks
        to_value = to_block * stride_vn + to_lane * stride_vh + to_slot * stride_vs
        tl.store(keys + to_key[:, None] + words, k, mask=both)
        tl.store(values + to_value[:, None] + words, v, mask=both)
        tl.store(my_scores + target, score, mask=live)
