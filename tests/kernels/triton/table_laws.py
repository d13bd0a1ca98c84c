# SPDX-License-Identifier: Apache-2.0
"""What table compaction must do, under the interpreter and on the GPU."""

import torch
from torch import Tensor

from h2o_vllm.kernels.triton import SCORED, compact_tables


def without_holes(
    block_table: Tensor, seq_lens: Tensor, flags: Tensor, block_size: int
) -> tuple[list[list[int]], list[int]]:
    """Block ids and live length of each row."""
    tables, lens = [], []
    for row, length in enumerate(seq_lens.tolist()):
        used = block_table[row, : -(-length // block_size)].tolist()
        live = [block for block in used if block != 0] if flags[row] & 1 else used
        tables.append(live)
        # The newest block of a request stays.
        lens.append(length - (len(used) - len(live)) * block_size if live else length)
    return tables, lens


def check_tables(
    table: Tensor, lens: Tensor, flags: Tensor, block_size: int, extra_rows: int = 0
) -> None:
    """Live ids and lengths equal the reference's; nothing is written behind them."""
    rows = len(lens) + extra_rows
    out = torch.full((rows, table.shape[1] + 5), -7, dtype=torch.int32, device=table.device)
    out_lens, scored, rest = (torch.full_like(out[:, 0], -7) for _ in range(3))
    before = table.clone()
    compact_tables(table, lens, flags, block_size, out, out_lens, scored, rest)
    want, want_lens = without_holes(table, lens, flags, block_size)
    for row, ids in enumerate(want):
        assert out[row].tolist() == ids + [-7] * (out.shape[1] - len(ids))
    ours = [bool(flag & SCORED) for flag in flags.tolist()]
    for got, keep in ((out_lens, None), (scored, True), (rest, False)):
        lengths = [
            n if keep is None or mine == keep else 0
            for n, mine in zip(want_lens, ours, strict=True)
        ]
        assert got.tolist() == lengths + [-7] * extra_rows
    assert torch.equal(table, before)
