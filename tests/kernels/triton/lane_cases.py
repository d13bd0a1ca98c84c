# SPDX-License-Identifier: Apache-2.0
"""Rows whose KV heads share slots: random owners of lanes, and batches of one head for the reference."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from h2o_vllm.kernels.batch import LaneTables
from tests.kernels.triton.cases import Batch, on_pages, random_owners

NOWHERE = -(2**30)
"""Where nobody may look: no page."""


def lanes_for(
    batch: Batch, heavy: Sequence[int], pinned: Sequence[int] = (), layers: int = 2, *, own: bool = False
) -> LaneTables:  # fmt: skip
    """Tables in which row i shares ``heavy[i]`` blocks behind its first ``pinned[i]`` ones; 0: none.

    Args:
        own: every lane is its own head's.
    """
    blocks, _, heads, _ = batch.key_cache.shape
    gen = torch.Generator().manual_seed(len(heavy))
    slots = len(heavy) + 2
    tables = LaneTables.empty(layers, blocks, heads, slots, len(heavy), "cpu")
    for table in (tables.pages, tables.offsets, tables.keys):
        table.fill_(NOWHERE)
    tables.owners.fill_(-100)
    for row, count in enumerate(heavy):
        if not count:
            continue
        slot = slots - 1 - row
        first = pinned[row] if pinned else 0
        tables.rows[row] = torch.tensor([slot, first, count])
        mine = batch.block_table[row, first : first + count].tolist()
        owners = random_owners(layers, count, heads, gen)
        if own:
            owners = torch.arange(heads).expand(layers, count, heads)
        tables.owners[:, mine] = owners.to(tables.owners)
        for layer in range(layers):
            pages = [pages_of(mine, owners[layer], head) for head in range(heads)]
            tables.offsets[layer, slot] = torch.tensor([0, *map(len, pages)]).cumsum(0)
            listed = torch.tensor([page for one in pages for page in one], dtype=torch.int32)
            tables.pages[layer, mine] = listed.view(count, heads)
    device = batch.query.device
    return LaneTables(**{name: table.to(device) for name, table in vars(tables).items()})


def pages_of(blocks: Sequence[int], owners: Tensor, head: int) -> list[int]:
    """The pages of one head in some blocks, in order; ``owners``: [n, KH]."""
    heads = owners.shape[1]
    return [
        block * heads + lane
        for block, row in zip(blocks, owners.tolist(), strict=True)
        for lane, owner in enumerate(row)
        if owner == head
    ]


def heads_apart(
    batch: Batch, lanes: LaneTables | None, layer: int, scores: Tensor
) -> Iterator[tuple[slice, Batch]]:
    """The batch as each KV head sees it in a layer, see :func:`.on_pages`; without lanes as it is."""
    if lanes is None:
        yield slice(None), dataclasses.replace(batch, scores=scores)
        return
    _, block_size, heads, _ = batch.key_cache.shape
    owners, rows = lanes.owners[layer].cpu(), lanes.rows.tolist()
    lengths, given = batch.seq_lens.tolist(), batch.block_table.tolist()

    def pages(head: int, row: int) -> tuple[list[int], int]:
        length = lengths[row]
        blocks = given[row][: -(-length // block_size)]
        slot, first, heavy = rows[row]
        shared = blocks[first : first + heavy] if slot >= 0 else []
        listed = pages_of(shared, owners[shared], head)
        mine = [block * heads + head for block in blocks]
        held = length + (len(listed) - heavy) * block_size if length else 0
        return [*mine[:first], *listed, *mine[first + heavy :]], held

    yield from on_pages(batch, pages, scores)
