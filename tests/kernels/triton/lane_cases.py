# SPDX-License-Identifier: Apache-2.0
"""Rows whose KV heads share slots: random owners of lanes, and batches of one head for the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from h2o_vllm.kernels.triton.lanes import LaneTables
from tests.kernels.triton.cases import Batch

NOWHERE = -(2**30)
"""Where nobody may look: no page."""


def random_owners(layers: int, blocks: int, heads: int, gen: torch.Generator) -> Tensor:
    """[L, blocks, KH]: whose each lane is; the first head has most of them, and each at least one."""
    owners = torch.randint(0, 2 * heads, (layers, blocks * heads), generator=gen)
    owners = owners % (heads + 2) % heads
    for layer in owners:
        layer[torch.randperm(blocks * heads, generator=gen)[:heads]] = torch.arange(heads)
    return owners.view(layers, blocks, heads)


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


def by_page(cache: Tensor) -> Tensor:
    """[N, BS, KH, D] as a cache of one head, whose block ids are page ids; a copy."""
    return cache.transpose(1, 2).flatten(0, 1).unsqueeze(2).contiguous()


def heads_apart(
    batch: Batch, lanes: LaneTables, layer: int, scores: Tensor
) -> Iterator[tuple[slice, Batch]]:
    """The batch as each KV head sees it: rows of other lengths, on pages.

    Yields:
        The q heads of a KV head, and a batch of that head alone; its scores are ``scores``, [N, KH, BS].
    """
    heads, block_size = batch.key_cache.shape[2], batch.key_cache.shape[1]
    group, device = batch.query.shape[1] // heads, batch.query.device
    keys, values = by_page(batch.key_cache), by_page(batch.value_cache)
    owners, rows = lanes.owners[layer].cpu(), lanes.rows.tolist()
    lengths, given = batch.seq_lens.tolist(), batch.block_table.tolist()
    for head in range(heads):
        tables, lens = [], list(lengths)
        for row, length in enumerate(lengths):
            blocks = given[row][: -(-length // block_size)]
            slot, first, heavy = rows[row]
            listed: list[int] = []
            if slot >= 0:
                shared = blocks[first : first + heavy]
                listed = pages_of(shared, owners[shared], head)
            mine = [block * heads + head for block in blocks]
            tables.append([*mine[:first], *listed, *mine[first + heavy :]])
            if length:
                lens[row] += (len(listed) - heavy) * block_size
        width = max(map(len, tables))
        table = [one + [0] * (width - len(one)) for one in tables]
        queries = slice(head * group, (head + 1) * group)
        yield (
            queries,
            dataclasses.replace(
                batch,
                query=batch.query[:, queries],
                key_cache=keys,
                value_cache=values,
                scores=scores.view(-1, 1, block_size),
                block_table=torch.tensor(table, dtype=torch.int32, device=device),
                seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
                poisoned=batch.poisoned.view(-1, 1, block_size),
                sinks=None if batch.sinks is None else batch.sinks[queries],
            ),
        )
