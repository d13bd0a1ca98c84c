# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The owners of lanes, if the KV heads of a layer share slots: how to read :class:`.LaneTables`.

:mod:`h2o_vllm.kernels.lanes` has the rule. Evictions apply it on the device, and the host never reads the
result. In each layer a request has a list of the pages of its heavy blocks, ordered by head. The list has one
entry per lane of these blocks, so it is stored in a table like the pool: entry ``i`` is at the request's
heavy block ``i // KH``, lane ``i % KH``. Then the keys of a head are::

    its own lanes of the pinned blocks | its entries of the list | its own lanes of the other blocks
                                        offsets[head] .. offsets[head + 1]

A row whose heads share nothing has no heavy block here, and the middle part is empty.

Decodes read each key in each layer. For them :func:`list_keys` writes the pages of a head's blocks after the
pinned ones into a contiguous list, once a step. Looking pages up in the loop over keys would take 1.7 times
the registers, and half as many programs would run on a processor.
"""

import triton
import triton.language as tl

from h2o_vllm.kernels.triton.paged import locate

LANES = ["layer", "num_slots", "num_blocks"]
"""Numbers of :class:`.LayerLanes`. Not specialised: new values compile nothing."""


EVERYWHERE = tl.constexpr(1 << 30)
"""Number of pinned blocks of a row whose heads share nothing: all of its blocks count as pinned."""


@triton.jit
def lanes_of(rows, offsets, layer, num_slots, row, head, real, KH: tl.constexpr):
    """For heads of ``real`` rows: pinned and heavy blocks, a head's first entry and its number of entries."""
    slot = tl.load(rows + row * 3, mask=real, other=-1)
    pinned = tl.load(rows + row * 3 + 1, mask=real, other=0)
    heavy = tl.load(rows + row * 3 + 2, mask=real, other=0)
    at = offsets + (layer * num_slots + tl.maximum(slot, 0)) * (KH + 1) + head
    first = tl.load(at, mask=slot >= 0, other=0)
    end = tl.load(at + 1, mask=slot >= 0, other=0)
    return pinned, heavy, first, end - first


@triton.jit
def length_of(
    rows, offsets, layer, num_slots, row, head, length, KH: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """For a head of a row of a live ``length``: its own, and what :func:`locate_token` needs."""
    pinned, heavy, first, count = 0, 0, 0, 0
    if rows is not None:
        pinned, heavy, first, count = lanes_of(rows, offsets, layer, num_slots, row, head, True, KH)
        length += (count - heavy) * BS
    return length, pinned, heavy, first, count


@triton.jit
def locate_token(
    table, rows, pages, layer, num_blocks, position, live, head, pinned, heavy, first, count,
    KH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """:func:`locate_page` in the tables of a layer; without these, :func:`.paged.locate` and the own lane."""
    if rows is None:
        block, slot = locate(table, position, live, BS)
        lane = head
    else:
        pages += layer.to(tl.int64) * num_blocks * KH
        block, lane, slot = locate_page(
            table, pages, position, live, head, pinned, heavy, first, count, KH, BS
        )  # fmt: skip
    return block, lane, slot


@triton.jit
def locate_page(
    table, pages, position, live, head, pinned, heavy, first, count,
    KH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Block id (64 bits), lane and slot of each position among a head's keys.

    ``table``: the row's block table; ``pages``: the layer's pages; for the others see :func:`lanes_of`.
    """
    index = position // BS
    place = index - pinned
    listed = live & (place >= 0) & (place < count)
    entry = first + tl.where(listed, place, 0)
    # After the list, positions count as if each head had its own lanes of the heavy blocks.
    index += tl.where(place >= count, heavy - count, 0)
    index = tl.where(listed, pinned + entry // KH, index)
    # In 32 bits, which take fewer registers: `checks.check_layers` ensures that they suffice.
    page = tl.load(table + index, mask=live, other=0) * KH
    page += tl.where(listed, entry % KH, head.to(tl.int32))
    page = tl.where(listed, tl.load(pages + page, mask=listed, other=0), page)
    return (page // KH).to(tl.int64), page % KH, position % BS


@triton.jit
def locate_listed(table, keys, position, live, head, pinned, KH: tl.constexpr, BS: tl.constexpr):
    """Page of each position among a head's keys, from the list of :func:`list_keys`.

    ``keys``: the layer's list, from where the head's part would begin if it had the ``pinned`` blocks.
    """
    index = position // BS
    own = index < pinned
    found = tl.load(tl.where(own, table + index, keys + index), mask=live, other=0)
    return tl.where(own, found * KH + head.to(tl.int32), found)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_pieces", "stride_table"])
def list_keys(
    block_table, pieces, lane_rows, lane_offsets, lane_pages, lane_keys, num_slots, num_blocks, num_pieces,
    stride_table,
    KH: tl.constexpr, BS: tl.constexpr, FIELDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the pages of one piece of a plan of heads, in one layer; see :data:`.plan.FIELDS`."""
    layer = tl.program_id(1)
    words = pieces + (layer.to(tl.int64) * num_pieces + tl.program_id(0)) * FIELDS
    row = tl.load(words)
    pinned = tl.load(words + 10)
    if (row < 0) | (pinned == EVERYWHERE):
        return
    head = tl.load(words + 9)
    of_layer = layer.to(tl.int64) * num_blocks * KH
    begin = tl.load(words + 11)
    table = block_table + row.to(tl.int64) * stride_table
    _pinned, heavy, first_entry, count = lanes_of(
        lane_rows, lane_offsets, layer, num_slots, row, head, True, KH
    )
    first = tl.maximum(tl.load(words + 2) // BS, pinned)
    end = (tl.load(words + 3) + BS - 1) // BS
    for at in range(first, end, WIDTH):
        index = at + tl.arange(0, WIDTH)
        block, lane, _slot = locate_page(
            table, lane_pages + of_layer, index * BS, index < end, head, pinned, heavy, first_entry, count,
            KH, BS,
        )  # fmt: skip
        # The list has room, as a block that is not pinned belongs to one request. The mask prevents overruns.
        fits = (index < end) & (begin + index < num_blocks * KH)
        tl.store(lane_keys + of_layer + begin + index, (block * KH + lane).to(tl.int32), mask=fits)
