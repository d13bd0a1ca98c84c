# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Evictions of one step: per layer and KV head, keep the tokens with the highest scores, and move their KV.

Two launches serve all layers, heads and evictions. The first launch finds the lowest score that survives, per
(eviction, layer, head). It maps scores to integers of the same order, and finds the threshold bit by bit.
Then it lists the moves: which slot each moving token leaves, and which slot it takes. The second launch moves
the tokens. It uses many programs, because a first eviction may move megabytes. The lists are in a scratch of
fixed size; a step that needs more takes several pairs of launches.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.evictions import Evictions, KVLayers
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.survivors import list_moves

__all__ = ["compact", "copy_moves"]

_CHUNKS = (1024, 4096)
"""Most candidates that one program ranks in registers, in two sizes; the smaller one takes half the warps.
More candidates are read again for each of the 32 bits. There are only two sizes because each is compiled."""
_MOVES = 16
"""Tokens per step of a moving program."""
_MOVERS = 8
"""Programs that share the moves of one (eviction, layer, head)."""


def compact(layers: KVLayers, scores: Tensor, evictions: Evictions) -> None:
    """Move the survivors of a step's evictions into their heavy blocks, with their scores. Eager.

    The result equals that of :func:`h2o_vllm.kernels.reference.compact`: per layer and KV head the candidates
    (heavy blocks, then doomed ones) with the highest scores survive. Of equal scores the candidate with the
    lower number comes first; NaN is lowest. Survivors in heavy blocks stay in place. Doomed blocks are only
    read, and no block is freed.

    Args:
        layers: the KV of all layers, and the scratch. scores: [L, N, KH, BS], float32, contiguous.
        evictions: a heavy block of one is in no other, neither as heavy nor as doomed.

    Raises:
        ValueError: one layer of one eviction does not fit the scratch.
    """
    num_layers, num_blocks, heads, block_size = scores.shape
    units = evictions.blocks.shape[0] * num_layers
    if units == 0:
        return
    # Moves are limited by the number of doomed tokens and by the room in heavy blocks.
    room = min(evictions.max_heavy, evictions.max_doomed) * block_size
    step = min(layers.moves.shape[0] // (heads * room), layers.counts.shape[0] // heads, units)
    if step == 0:
        raise ValueError(f"{heads} lists of {room} moves do not fit {layers.nbytes} bytes")
    candidates = (evictions.max_heavy + evictions.max_doomed) * block_size
    chunk = _CHUNKS[0] if candidates <= _CHUNKS[0] else _CHUNKS[1]
    row_words = layers.key_caches[0].shape[3] // layers.words
    strides = layers.word_strides
    selects = {
        "KH": heads,
        "BS": block_size,
        "CHUNK": chunk,
        "ONE_CHUNK": candidates <= chunk,
        "num_warps": 4 if chunk == _CHUNKS[0] else 8,
        # Without this, ptxas uses fewer registers on sm_80 and sm_89, and spills.
        "maxnreg": 128,
    }
    moves = {
        "KH": heads, "BS": block_size, "WORDS": row_words, "WORDS_P": triton.next_power_of_2(row_words),
        "MOVES": _MOVES, "MOVERS": _MOVERS, "num_warps": 4,
    }  # fmt: skip
    for first in range(0, units, step):
        now = min(step, units - first)
        given: tuple[Any, ...] = (
            scores, evictions.blocks, evictions.counts, layers.moves, layers.counts, first, num_layers,
            num_blocks, evictions.blocks.stride(0), evictions.counts.stride(0), room,
        )  # fmt: skip
        launch(_select, (now, heads), tuple(selects.values()), given, selects)
        given = (
            layers.pointers, scores, layers.moves, layers.counts, first, num_layers, num_blocks, room,
            *strides,
        )  # fmt: skip
        launch(_move, (now, heads, _MOVERS), (strides, *moves.values()), given, moves)


@triton.jit(
    do_not_specialize=[
        "first_unit",
        "num_layers",
        "num_blocks",
        "room",
        "stride_blocks",
        "stride_counts",
    ]
)
def _select(
    scores,
    blocks,
    counts,
    moves,
    move_counts,
    first_unit,
    num_layers,
    num_blocks,
    stride_blocks,
    stride_counts,
    room,
    KH: tl.constexpr,
    BS: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """List the moves of one (eviction, layer, head)."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    unit = first_unit + place
    eviction = unit // num_layers
    layer = unit % num_layers
    heavy = tl.load(counts + eviction * stride_counts)
    doomed = tl.load(counts + eviction * stride_counts + 1)
    keep = heavy * BS
    total = keep + doomed * BS
    my_blocks = blocks + eviction * stride_blocks
    my_scores = scores + (layer.to(tl.int64) * num_blocks * KH + head) * BS
    mine = moves + (place * KH + head).to(tl.int64) * room * 2
    leavers, _takers = list_moves(
        my_scores, my_blocks, keep, total, keep, mine, KH, BS, CHUNK, ONE_CHUNK
    )
    tl.store(move_counts + place * KH + head, leavers)


@triton.jit(do_not_specialize=["first_unit", "num_layers", "num_blocks", "room"])
def _move(
    pointers,
    scores,
    moves,
    move_counts,
    first_unit,
    num_layers,
    num_blocks,
    room,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_vn,
    stride_vs,
    stride_vh,
    KH: tl.constexpr,
    BS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P: tl.constexpr,
    MOVES: tl.constexpr,
    MOVERS: tl.constexpr,
):
    """Copy every MOVERS-th group of moves of one (eviction, layer, head)."""
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    layer = (first_unit + place) % num_layers
    count = tl.load(move_counts + place * KH + head)
    mine = moves + (place * KH + head) * room * 2
    keys = tl.load(pointers + layer).to(tl.pointer_type(tl.int64)) + head * stride_kh
    values = tl.load(pointers + num_layers + layer).to(tl.pointer_type(tl.int64)) + head * stride_vh
    my_scores = scores + (layer.to(tl.int64) * num_blocks * KH + head) * BS
    copy_moves(
        keys, values, my_scores, mine, count, stride_kn, stride_ks, 0, stride_vn, stride_vs, 0,
        KH, 1, BS, WORDS, WORDS_P, MOVES, MOVERS,
    )  # fmt: skip


@triton.jit
def copy_moves(
    keys, values, my_scores, moves, count,
    stride_kn, stride_ks, stride_kh, stride_vn, stride_vs, stride_vh,
    KH: tl.constexpr, LANES: tl.constexpr, BS: tl.constexpr, WORDS: tl.constexpr, WORDS_P: tl.constexpr,
    MOVES: tl.constexpr, MOVERS: tl.constexpr,
):  # fmt: skip
    """Copy the K, V and score of every MOVERS-th group of moves that :func:`.list_moves` has listed.

    ``LANES``: KH if slots are slots of pages, and the tensors begin at lane 0; else 1.
    """
    words = tl.arange(0, WORDS_P)[None, :]
    for at in range(tl.program_id(2) * MOVES, count, MOVES * MOVERS):
        index = at + tl.arange(0, MOVES)
        live = index < count
        source = tl.load(moves + index * 2, mask=live, other=0)
        target = tl.load(moves + index * 2 + 1, mask=live, other=0)
        from_block, from_lane = (source // (LANES * BS)).to(tl.int64), source // BS % LANES
        to_block, to_lane = (target // (LANES * BS)).to(tl.int64), target // BS % LANES
        from_slot, to_slot = source % BS, target % BS
        both = live[:, None] & (words < WORDS)
        from_key = from_block * stride_kn + from_lane * stride_kh + from_slot * stride_ks
        from_value = from_block * stride_vn + from_lane * stride_vh + from_slot * stride_vs
        k = tl.load(keys + from_key[:, None] + words, mask=both)
        v = tl.load(values + from_value[:, None] + words, mask=both)
        from_score = from_block * (KH * BS) + from_lane * BS + from_slot
        score = tl.load(my_scores + from_score, mask=live)
        to_key = to_block * stride_kn + to_lane * stride_kh + to_slot * stride_ks
        to_value = to_block * stride_vn + to_lane * stride_vh + to_slot * stride_vs
        tl.store(keys + to_key[:, None] + words, k, mask=both)
        tl.store(values + to_value[:, None] + words, v, mask=both)
        to_score = to_block * (KH * BS) + to_lane * BS + to_slot
        tl.store(my_scores + to_score, score, mask=live)
