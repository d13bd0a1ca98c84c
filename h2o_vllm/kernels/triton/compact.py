# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Evictions of one step: per layer and kv head, keep the highest-scored tokens and move their KV.

Two launches for all layers, heads and evictions. The first finds, per (eviction, layer, head), the lowest
score that survives - bit by bit, on scores mapped to integers of the same order - and lists which slot each
moving token leaves and which it takes. The second moves, by many programs, because a first eviction may move
megabytes. The lists live in a scratch of fixed size; a step that needs more takes several pairs of launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.evictions import Evictions, KVLayers
from h2o_vllm.kernels.triton.survivors import lowest_survivor, ranks_of, slot_of

__all__ = ["compact"]

_CHUNKS = (1024, 4096)
"""Candidates that one program ranks in registers, the first by half as many warps; more than the
second are read again for each of the 32 bits. Few sizes, because each is compiled."""
_MOVES = 16
"""Tokens per step of a moving program."""
_MOVERS = 8
"""Programs that share the moves of one (eviction, layer, head)."""


def compact(layers: KVLayers, scores: Tensor, evictions: Evictions) -> None:
    """Move the survivors of a step's evictions into their heavy blocks, with their scores. Eager.

    Which tokens survive and where they go is exactly :func:`h2o_vllm.kernels.reference.compact`: the
    highest-scored candidates (heavy blocks, then doomed ones) per layer and kv head; of equal scores the one
    with the lower number, NaN lowest; survivors in heavy blocks stay. Doomed blocks are only read. Frees
    nothing.

    Args:
        layers: see there. scores: [L, N, KH, BS], float32, contiguous.
        evictions: heavy blocks are listed once among all of them, and are doomed in none.

    Raises:
        ValueError: one layer of one eviction does not fit the scratch.
    """
    num_layers, num_blocks, heads, block_size = scores.shape
    units = evictions.blocks.shape[0] * num_layers
    if units == 0:
        return
    # No more tokens can move than there are doomed ones, nor than there is room for.
    room = min(evictions.max_heavy, evictions.max_doomed) * block_size
    step = min(layers.moves.shape[0] // (heads * room), layers.counts.shape[0] // heads, units)
    if step == 0:
        raise ValueError(f"{heads} lists of {room} moves do not fit {layers.nbytes} bytes")
    candidates = (evictions.max_heavy + evictions.max_doomed) * block_size
    chunk = _CHUNKS[0] if candidates <= _CHUNKS[0] else _CHUNKS[1]
    key, value = layers.key_caches[0], layers.value_caches[0]
    row_words = key.shape[3] // layers.words
    for first in range(0, units, step):
        now = min(step, units - first)
        _select[(now, heads)](
            scores,
            evictions.blocks,
            evictions.counts,
            layers.moves,
            layers.counts,
            first,
            num_layers,
            num_blocks,
            evictions.blocks.stride(0),
            evictions.counts.stride(0),
            room,
            KH=heads,
            BS=block_size,
            CHUNK=chunk,
            ONE_CHUNK=candidates <= chunk,
            num_warps=4 if chunk == _CHUNKS[0] else 8,
        )
        _move[(now, heads, _MOVERS)](
            layers.pointers,
            scores,
            layers.moves,
            layers.counts,
            first,
            num_layers,
            num_blocks,
            room,
            *(stride // layers.words for stride in (*key.stride()[:3], *value.stride()[:3])),
            KH=heads,
            BS=block_size,
            WORDS=row_words,
            WORDS_P=triton.next_power_of_2(row_words),
            MOVES=_MOVES,
            MOVERS=_MOVERS,
            num_warps=4,
        )


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
    lanes = tl.arange(0, CHUNK)

    threshold, above = lowest_survivor(
        my_scores, my_blocks, keep, total, KH, BS, CHUNK, ONE_CHUNK
    )  # fmt: skip

    # In candidate order: of those at the threshold the first ones stay; survivors among the doomed and
    # losers among the heavy are numbered, and equal numbers meet.
    ties_left = keep - above
    leavers = 0
    takers = 0
    mine = moves + (place * KH + head).to(tl.int64) * room * 2
    for at in range(0, total, CHUNK):
        candidate = at + lanes
        live = candidate < total
        ranks = ranks_of(my_scores, my_blocks, candidate, live, KH, BS)
        tie = (live & (ranks == threshold)).to(tl.int32)
        tie_number = tl.cumsum(tie, 0)
        survives = live & ((ranks > threshold) | ((tie == 1) & (tie_number <= ties_left)))
        leaves = (survives & (candidate >= keep)).to(tl.int32)
        takes = (live & (survives == 0) & (candidate < keep)).to(tl.int32)
        slot = slot_of(my_blocks, candidate, live, BS)
        tl.store(mine + (leavers + tl.cumsum(leaves, 0) - 1) * 2, slot, mask=leaves == 1)
        tl.store(mine + (takers + tl.cumsum(takes, 0) - 1) * 2 + 1, slot, mask=takes == 1)
        ties_left -= tl.sum(tie, 0)
        leavers += tl.sum(leaves, 0)
        takers += tl.sum(takes, 0)
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
    """Copy the K, V and score of every MOVERS-th group of moves of one (eviction, layer, head)."""
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    layer = (first_unit + place) % num_layers
    count = tl.load(move_counts + place * KH + head)
    mine = moves + (place * KH + head) * room * 2
    keys = tl.load(pointers + layer).to(tl.pointer_type(tl.int64)) + head * stride_kh
    values = tl.load(pointers + num_layers + layer).to(tl.pointer_type(tl.int64)) + head * stride_vh
    my_scores = scores + (layer.to(tl.int64) * num_blocks * KH + head) * BS
    words = tl.arange(0, WORDS_P)[None, :]
    for at in range(tl.program_id(2) * MOVES, count, MOVES * MOVERS):
        index = at + tl.arange(0, MOVES)
        live = index < count
        source = tl.load(mine + index * 2, mask=live, other=0)
        target = tl.load(mine + index * 2 + 1, mask=live, other=0)
        from_block, from_slot = (source // BS).to(tl.int64), source % BS
        to_block, to_slot = (target // BS).to(tl.int64), target % BS
        both = live[:, None] & (words < WORDS)
        k = tl.load(
            keys + (from_block * stride_kn + from_slot * stride_ks)[:, None] + words, mask=both
        )
        v = tl.load(
            values + (from_block * stride_vn + from_slot * stride_vs)[:, None] + words, mask=both
        )
        score = tl.load(my_scores + from_block * (KH * BS) + from_slot, mask=live)
        tl.store(keys + (to_block * stride_kn + to_slot * stride_ks)[:, None] + words, k, mask=both)
        tl.store(
            values + (to_block * stride_vn + to_slot * stride_vs)[:, None] + words, v, mask=both
        )
        tl.store(my_scores + to_block * (KH * BS) + to_slot, score, mask=live)
