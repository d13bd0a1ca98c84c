# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The number of lanes of each KV head, per layer: steps 1 to 3 of :mod:`h2o_vllm.kernels.lanes`.

The first kernel lists each head's candidates, page by page. The second finds the layer's best tokens among
all of them, and assigns lanes. The results are in the scratch, with one part per (eviction, layer)::

    candidate pages, by head | begins | counts | owned | lanes | moves | lists of moves
    W * KH                   | KH     | KH     | KH    | KH    | KH    | 2 * slots of the heavy blocks

``begins`` and ``counts``: the range of a head's candidates in the first list; ``owned``: how many of them,
the first ones, are in heavy blocks; ``lanes``: the number of lanes that it gets; ``moves``: how many of its
tokens move. A head's moves are pairs of slots, from and to. They begin where its slots would begin if the
lanes of all heads were contiguous: a head has no more moves than slots.
"""

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.survivors import lowest_survivor, ranks_of

SIZES = [
    "first_unit",
    "num_layers",
    "num_blocks",
    "stride_blocks",
    "stride_counts",
    "list_room",
    "unit_room",
]
"""Arguments that all kernels of sharing take without specialisation: new values compile nothing."""
_LOWEST = tl.constexpr(-(1 << 30))


def unit_words(blocks: int, heavy: int, kv_heads: int, block_size: int) -> int:
    """32-bit words of scratch per (eviction, layer), an even number."""
    words = blocks * kv_heads + 5 * kv_heads
    return words + words % 2 + 2 * heavy * kv_heads * block_size


@triton.jit
def of_place(
    blocks, counts, scratch, place, first_unit, num_layers, stride_blocks, stride_counts, unit_room
):
    """Layer, block ids, numbers of heavy and doomed blocks, slot and scratch of one (eviction, layer)."""
    unit = first_unit + place
    eviction = (unit // num_layers).to(tl.int64)
    mine = counts + eviction * stride_counts
    return (
        (unit % num_layers).to(tl.int64), blocks + eviction * stride_blocks, tl.load(mine), tl.load(mine + 1),
        tl.load(mine + 2), scratch + place.to(tl.int64) * unit_room,
    )  # fmt: skip


@triton.jit
def field(mine, list_room, which: tl.constexpr, KH: tl.constexpr):
    """Pointer to one of the fields with a number per head, in the order above."""
    return mine + list_room + which * KH


@triton.jit(do_not_specialize=SIZES)
def list_lanes(
    blocks, counts, owners, scratch, first_unit, num_layers, num_blocks, stride_blocks, stride_counts,
    list_room, unit_room,
    KH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the candidate pages of one head, in the order of blocks and lanes."""
    head = tl.program_id(1)
    layer, my_blocks, heavy, doomed, _slot, mine = of_place(
        blocks, counts, scratch, tl.program_id(0), first_unit, num_layers, stride_blocks, stride_counts,
        unit_room,
    )  # fmt: skip
    my_owners = owners + layer * num_blocks * KH
    total = (heavy + doomed) * KH
    before = 0
    count = 0
    owned = 0
    for at in range(0, total, CHUNK):
        index = at + tl.arange(0, CHUNK)
        _, owner = _page_and_owner(my_blocks, my_owners, index, index < total, KH)
        before += tl.sum((owner < head).to(tl.int32), 0)
        count += tl.sum((owner == head).to(tl.int32), 0)
        owned += tl.sum(((owner == head) & (index < heavy * KH)).to(tl.int32), 0)
    tl.store(field(mine, list_room, 0, KH) + head, before)
    tl.store(field(mine, list_room, 1, KH) + head, count)
    tl.store(field(mine, list_room, 2, KH) + head, owned)
    listed = before
    for at in range(0, total, CHUNK):
        index = at + tl.arange(0, CHUNK)
        page, owner = _page_and_owner(my_blocks, my_owners, index, index < total, KH)
        is_mine = (owner == head).to(tl.int32)
        tl.store(mine + listed + tl.cumsum(is_mine, 0) - 1, page, mask=is_mine == 1)
        listed += tl.sum(is_mine, 0)


@triton.jit
def _page_and_owner(my_blocks, my_owners, index, live, KH: tl.constexpr):
    """Page and head of each lane of an eviction, in order; after the last lane, a number of no head."""
    block = tl.load(my_blocks + index // KH, mask=live, other=0)
    fresh = block < 0
    page = tl.where(fresh, -1 - block, block) * KH + index % KH
    owner = tl.load(my_owners + page, mask=live & (fresh == 0), other=0).to(tl.int32)
    owner = tl.where(fresh, index % KH, owner)
    return page, tl.where(live, owner, KH)


@triton.jit(do_not_specialize=[*SIZES, "num_slots"])
def share_lanes(
    blocks, counts, offsets, num_slots, scores, scratch, first_unit, num_layers, num_blocks, stride_blocks,
    stride_counts, list_room, unit_room,
    KH: tl.constexpr, KHP: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Assign the lanes of one layer's heavy blocks."""
    layer, _blocks, heavy, doomed, slot, mine = of_place(
        blocks, counts, scratch, tl.program_id(0), first_unit, num_layers, stride_blocks, stride_counts,
        unit_room,
    )  # fmt: skip
    my_scores = scores + layer * num_blocks * KH * BS
    keep = heavy * KH * BS
    threshold, above = lowest_survivor(
        my_scores, mine, 0, keep, keep + doomed * KH * BS, 1, BS, CHUNK, ONE_CHUNK=False
    )  # fmt: skip
    # Per head: numbers of tokens above the threshold, and at it.
    heads = tl.arange(0, KHP)
    better = tl.zeros([KHP], tl.int32)
    ties = tl.zeros([KHP], tl.int32)
    for head in range(KH):
        first = tl.load(field(mine, list_room, 0, KH) + head)
        total = tl.load(field(mine, list_room, 1, KH) + head) * BS
        for at in range(0, total, CHUNK):
            candidate = at + tl.arange(0, CHUNK)
            ranks = ranks_of(my_scores, mine + first, 0, candidate, candidate < total, 1, BS)
            this = heads == head
            better += tl.where(this, tl.sum((ranks > threshold).to(tl.int32), 0), 0)
            ties += tl.where(this, tl.sum((ranks == threshold).to(tl.int32), 0), 0)
    # Of tokens with equal scores, those of lower heads come first.
    ties = tl.minimum(tl.maximum(keep - above - (tl.cumsum(ties, 0) - ties), 0), ties)
    lanes = _given(better + ties, heavy * KH, heads, KH, BS)
    tl.store(field(mine, list_room, 3, KH) + heads, lanes, mask=heads < KH)
    my_offsets = offsets + (layer * num_slots + slot) * (KH + 1)
    tl.store(my_offsets + heads + 1, tl.cumsum(lanes, 0), mask=heads < KH)
    tl.store(my_offsets, 0)


@triton.jit
def _given(wanted, lanes, heads, KH: tl.constexpr, BS: tl.constexpr):
    """[KHP]: the lanes of each head; ``wanted``: the tokens that each head wants."""
    real = heads < KH
    given = real.to(tl.int32)
    left = lanes - KH
    # The rule gives lanes one by one to the head that wants most tokens, and each lane lowers what the head
    # wants. This finds the want at which the last lane is given, and so gives all lanes at once.
    rest = tl.where(real, wanted - given * BS, _LOWEST)
    low = -lanes * BS
    high = lanes * BS
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum(_given_from(rest, middle, BS), 0) >= left
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = _given_from(rest, high, BS)
    last = _given_from(rest, low, BS) - above
    last = tl.where(tl.cumsum(last, 0) <= left - tl.sum(above, 0), last, 0)
    return given + above + last


@triton.jit
def _given_from(rest, want, BS: tl.constexpr):
    """Number of lanes that are given at this want or a higher one."""
    return tl.where(rest >= want, tl.maximum(rest - want, 0) // BS + 1, 0)
