# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Whose each lane is, where the KV heads of a layer share slots: tables on the device, and how to read them.

The rule is :mod:`h2o_vllm.kernels.lanes`; only evictions know its outcome, and the host never asks. A request
has a list of the pages of its heavy blocks, ordered by head, in each layer. It has as many entries as these
blocks have lanes, so that is where it lies: entry ``i`` at the request's heavy block ``i // KH``, lane ``i %
KH``, of a table like the pool. What a head's keys are is then::

    its own lanes of the pinned blocks | its entries of the list | its own lanes of the other blocks
                                        offsets[head] .. offsets[head + 1]

A row whose heads share nothing has no heavy block here, and the middle part is empty.

Decodes meet every key in every layer. For them it is written out once a step, by :func:`list_keys`: the pages
of a head's blocks behind the pinned ones, side by side. Looked up in the loop over the keys it would take 1.7
times the registers, and half as many programs would share a processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "EVERYWHERE",
    "LANES",
    "LaneTables",
    "LayerLanes",
    "in_layer",
    "lanes_of",
    "list_keys",
    "locate_listed",
    "locate_page",
]

LANES = ["layer", "num_slots", "num_blocks"]
"""Numbers of :class:`LayerLanes` for whose values no kernel is compiled anew."""


EVERYWHERE = tl.constexpr(1 << 30)
"""In place of a number of pinned blocks: all of a row's are its heads' own."""


class LayerLanes(NamedTuple):
    """What kernels are told of one layer; nothing, if no row's heads share slots."""

    rows: Tensor | None = None
    offsets: Tensor | None = None
    pages: Tensor | None = None
    layer: int | None = None
    num_slots: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True)
class LaneTables:
    """The lanes of all requests whose heads share slots; made once, so that CUDA graphs may hold it.

    Attributes:
        owners: [L, N, KH], int8: whose each lane of a heavy block is. Of other blocks it says nothing.
        pages: [L, N, KH], int32: the lists; a page is ``block_id * KH + lane``.
        offsets: [L, S, KH + 1], int32: where each head's entries begin and end, by the request's slot.
        rows: [B, 3], int32: of each row of the batch its request's slot, its pinned blocks, which come first
            in its block table, and its heavy ones, which follow them; -1, 0, 0: its heads share nothing.
        keys: [L, N * KH], int32: the pages of this step's decodes, head by head, in the order of their keys.
            Blocks behind the pinned ones are one request's, so that there are never more.
    """

    owners: Tensor
    pages: Tensor
    offsets: Tensor
    rows: Tensor
    keys: Tensor

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        num_slots: int,
        max_rows: int,
        device: torch.device | str,
    ) -> LaneTables:
        """Of nobody yet."""

        def zeros(*shape: int, of: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        rows = zeros(max_rows, 3)
        rows[:, 0] = -1
        return cls(
            owners=zeros(num_layers, num_blocks, num_heads, of=torch.int8),
            pages=zeros(num_layers, num_blocks, num_heads),
            offsets=zeros(num_layers, num_slots, num_heads + 1),
            rows=rows,
            keys=zeros(num_layers, num_blocks * num_heads),
        )

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        tables = (self.owners, self.pages, self.offsets, self.rows, self.keys)
        return sum(table.nbytes for table in tables)

    def of_layer(self, layer: int) -> LayerLanes:
        """As the kernels take it. Whole tables: parts of them would be aligned otherwise in each layer."""
        slots, blocks = self.offsets.shape[1], self.pages.shape[1]
        return LayerLanes(self.rows, self.offsets, self.pages, layer, slots, blocks)


def in_layer(lanes: LaneTables | None, layer: int) -> LayerLanes:
    """:meth:`LaneTables.of_layer`, or nothing."""
    return LayerLanes() if lanes is None else lanes.of_layer(layer)


@triton.jit
def lanes_of(rows, offsets, layer, num_slots, row, head, real, KH: tl.constexpr):
    """Of heads of ``real`` rows: pinned and heavy blocks, their first entry and how many they have."""
    slot = tl.load(rows + row * 3, mask=real, other=-1)
    pinned = tl.load(rows + row * 3 + 1, mask=real, other=0)
    heavy = tl.load(rows + row * 3 + 2, mask=real, other=0)
    at = offsets + (layer * num_slots + tl.maximum(slot, 0)) * (KH + 1) + head
    first = tl.load(at, mask=slot >= 0, other=0)
    end = tl.load(at + 1, mask=slot >= 0, other=0)
    return pinned, heavy, first, end - first


@triton.jit
def locate_page(
    table, pages, position, live, head, pinned, heavy, first, count,
    KH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Block id (64 bits), lane and slot of each of the positions among a head's keys.

    ``table``: of the row; ``pages``: of the layer; the others: see :func:`lanes_of`.
    """
    index = position // BS
    place = index - pinned
    listed = live & (place >= 0) & (place < count)
    entry = first + tl.where(listed, place, 0)
    # Behind the list, as if each head had had its own lanes of the heavy blocks.
    index += tl.where(place >= count, heavy - count, 0)
    index = tl.where(listed, pinned + entry // KH, index)
    # In 32 bits, which take fewer registers: `checks.check_layers` has seen to it that slots have numbers.
    page = tl.load(table + index, mask=live, other=0) * KH
    page += tl.where(listed, entry % KH, head.to(tl.int32))
    page = tl.where(listed, tl.load(pages + page, mask=listed, other=0), page)
    return (page // KH).to(tl.int64), page % KH, position % BS


@triton.jit
def locate_listed(table, keys, position, live, head, pinned, KH: tl.constexpr, BS: tl.constexpr):
    """Page of each of the positions among a head's keys, which :func:`list_keys` has listed.

    ``keys``: of the layer, from where the head's list would begin if the ``pinned`` blocks were in it.
    """
    index = position // BS
    own = index < pinned
    found = tl.load(tl.where(own, table + index, keys + index), mask=live, other=0)
    return tl.where(own, found * KH + head.to(tl.int32), found)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_pieces", "stride_table"])
def list_keys(
    block_table,
    pieces,
    lane_rows,
    lane_offsets,
    lane_pages,
    lane_keys,
    num_slots,
    num_blocks,
    num_pieces,
    stride_table,
    KH: tl.constexpr,
    BS: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The pages of one piece of a plan of heads, in one layer; see :data:`.plan.FIELDS`."""
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
        # There is room, as blocks behind the pinned ones are one request's; else nobody is written over.
        fits = (index < end) & (begin + index < num_blocks * KH)
        tl.store(lane_keys + of_layer + begin + index, (block * KH + lane).to(tl.int32), mask=fits)
