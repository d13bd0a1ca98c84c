# SPDX-License-Identifier: Apache-2.0
"""Rows whose KV heads share the first half of their blocks, for the GPU kernels; and what must come out."""

import torch
from torch import Tensor

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import LaneTables, LayerBatch


def half_shared(table: Tensor, num_layers: int, num_blocks: int, kv_heads: int) -> LaneTables:
    """Head h has h + 1 times as many lanes as head 0, spread over the shared blocks; the same in all layers.

    Args:
        table: [B, MB], int32, block ids, none twice; MB at least 2.
    """
    rows, heavy = table.shape[0], table.shape[1] // 2
    lanes = LaneTables.empty(num_layers, num_blocks, kv_heads, rows, rows, table.device)
    order = torch.randperm(heavy * kv_heads, generator=torch.Generator().manual_seed(1))
    order = order.to(table.device)
    numbers = torch.arange(1, kv_heads + 1)
    # One each at least.
    ends = torch.maximum(numbers.cumsum(0) * len(order) // int(numbers.sum()), numbers)
    blocks = table[:, :heavy].long()
    pages = blocks[:, order // kv_heads] * kv_heads + order % kv_heads
    lanes.offsets[:, :, 1:] = ends.to(table.device)
    lanes.pages[:, blocks.flatten()] = pages.view(-1, kv_heads).int()
    lanes.rows[:, 0] = torch.arange(rows, device=table.device)
    lanes.rows[:, 2] = heavy
    return lanes


def expected(batch: LayerBatch) -> tuple[Tensor, Tensor]:
    """Decode attention of the first layer by the reference, head by head: output, and scores from zero.

    Args:
        batch: with lanes, and one query per row.
    """
    query, table, lens, lanes = batch.query, batch.block_table, batch.seq_lens, batch.lanes
    assert lanes is not None
    blocks, block_size, kv_heads, _ = batch.key_cache.shape
    out, scores = torch.empty_like(query), torch.zeros(
        blocks * kv_heads, 1, block_size, device=query.device
    )  # fmt: skip
    keys, values = (
        half.transpose(1, 2).flatten(0, 1).unsqueeze(2)
        for half in (batch.key_cache, batch.value_cache)
    )
    group = query.shape[1] // kv_heads
    for row, heavy in enumerate(lanes.rows[:, 2].tolist()):
        listed = lanes.pages[0, table[row, :heavy].long()].flatten()
        ends = lanes.offsets[0, row].tolist()
        for head in range(kv_heads):
            mine = listed[ends[head] : ends[head + 1]]
            pages = torch.cat([mine, table[row, heavy:] * kv_heads + head])[None]
            length = lens[row : row + 1] + (len(mine) - heavy) * block_size
            queries = slice(head * group, (head + 1) * group)
            alone = batch._replace(
                query=query[row : row + 1, queries], key_cache=keys, value_cache=values, scores=scores,
                block_table=pages, query_start_loc=batch.query_start_loc[:2], seq_lens=length,
            )  # fmt: skip
            reference.attend_decode(alone, out[row : row + 1, queries])
    return out, scores.view(blocks, kv_heads, block_size)
