# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The second launch of :mod:`.prompt`: adds the partial sums of a row's segments to the scores."""

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.lanes import LANES, length_of, locate_token

SUMMED_KEYS = 256
"""Keys per program."""


@triton.jit(do_not_specialize=["stride_table", *LANES])
def add_partial_sums(
    scores, partial, block_table, seq_lens, segments, stride_table, lane_rows, lane_offsets, lane_pages,
    layer, num_slots, num_blocks,
    KH: tl.constexpr, BS: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add the sums of the segments after a row's first, for some keys of one KV head, segment by segment."""
    words = segments + tl.program_id(2) * FIELDS
    follow = tl.load(words + 5)
    row = tl.load(words)
    length = tl.load(seq_lens + row)
    kv_head = tl.program_id(1).to(tl.int64)
    length, pinned, heavy, first, count = length_of(
        lane_rows, lane_offsets, layer, num_slots, row, kv_head, length, KH, BS
    )
    first_key = tl.program_id(0) * KEYS
    if follow == 0 or first_key >= length:
        return
    room = tl.load(words + 4)
    position = first_key + tl.arange(0, KEYS)
    live = position < length
    table = block_table + row.to(tl.int64) * stride_table
    block, lane, slot = locate_token(
        table, lane_rows, lane_pages, layer, num_blocks, position, live, kv_head, pinned, heavy, first, count,
        KH, BS,
    )  # fmt: skip
    target = scores + (block * KH + lane) * BS + slot
    score = tl.load(target, mask=live)
    columns = partial + tl.load(words + FIELDS + 3) + kv_head * room + position
    due = tl.where(live, follow, 0)
    # Distance between segments; in 64 bits, so that its products have 64 bits.
    step = room.to(tl.int64) * KH
    for at in range(0, follow, UNROLLED):
        # Loaded together, and added in order, as if each segment had a call of its own.
        for ahead in tl.static_range(UNROLLED):
            score += tl.load(columns + (at + ahead) * step, mask=due > at + ahead, other=0.0)
    tl.store(target, score, mask=live)
