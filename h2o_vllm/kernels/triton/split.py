# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Splits the scores of rows into early attention and the attention of late queries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.launching import launch


def split_scores(
    scores: Tensor, early: Tensor, block_table: Tensor, seq_lens: Tensor, rows: Tensor, max_len: int
) -> None:
    """Replace ``early`` by ``scores - early`` for some rows, in all layers and heads. Eager, one launch.

    Call it once per row, in the step of the row's first late query: after the attention of all queries has
    been added to ``scores``, and that of late queries to ``early``.

    Args:
        scores: [L, N, KH, BS], float32, contiguous. early: the same.
        block_table: [B, MB], int32, without holes. seq_lens: [B], int32, live lengths.
        rows: [R], int32: the rows to process, each once.
        max_len: the largest live length of a listed row; a host number, it sizes the grid.
    """
    layers, blocks, heads, block_size = scores.shape
    if rows.shape[0] == 0 or max_len < 1:
        return
    page = heads * block_size
    constants = {
        "BS": block_size, "PAGE": page, "PADDED": triton.next_power_of_2(page), "num_warps": 4,
    }  # fmt: skip
    grid = (-(-max_len // block_size), rows.shape[0], layers)
    given = (scores, early, block_table, seq_lens, rows, blocks, block_table.stride(0))
    launch(_each_block, grid, (heads, block_size), given, constants)


@triton.jit(do_not_specialize=["num_blocks", "stride_table"])
def _each_block(
    scores,
    early,
    block_table,
    seq_lens,
    rows,
    num_blocks,
    stride_table,
    BS: tl.constexpr,
    PAGE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One block of one row and layer."""
    index = tl.program_id(0)
    row = tl.load(rows + tl.program_id(1))
    if index * BS >= tl.load(seq_lens + row):
        return
    block = tl.load(block_table + row.to(tl.int64) * stride_table + index).to(tl.int64)
    slot = tl.arange(0, PADDED)
    page = (tl.program_id(2).to(tl.int64) * num_blocks + block) * PAGE + slot
    old = tl.load(scores + page, mask=slot < PAGE, other=0.0)
    late = tl.load(early + page, mask=slot < PAGE, other=0.0)
    tl.store(early + page, old - late, mask=slot < PAGE)
