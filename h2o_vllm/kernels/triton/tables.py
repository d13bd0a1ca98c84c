# SPDX-License-Identifier: Apache-2.0
"""Block tables without holes, in the metadata builder's own buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_vllm.kernels import reference_paged

__all__ = ["EVICTING", "SCORED", "compact_tables"]

EVICTING = 1
"""Flag of a row whose table may have holes: ids 0 in its used part are dropped."""
SCORED = 2
"""Flag of a row whose attention is scored: ours, not vLLM's."""


def compact_tables(
    block_table: Tensor,
    seq_lens: Tensor,
    flags: Tensor,
    block_size: int,
    out_table: Tensor,
    out_lens: Tensor,
    out_scored: Tensor | None = None,
    out_rest: Tensor | None = None,
) -> None:
    """The batch as attention should see it. Eager, one launch, no synchronisation.

    Only the used part of each row of ``out_table`` is written: what lies behind the live length is stale.

    Args:
        block_table: [B, MB], int32; may be strided along B. seq_lens: [B], int32, logical lengths.
        flags: [B], int8, sums of :data:`EVICTING` and :data:`SCORED`. Rows that do not evict are copied.
        out_table: [at least B, MB], int32, another tensor than ``block_table``; may be strided.
        out_lens: [at least B], int32: live lengths.
        out_scored: live lengths of the scored rows, 0 for the others: for ``DecodeWorkspace.plan`` and
            :func:`.prompt.add_prompt_scores`.
        out_rest: live lengths of the rows left to vLLM, 0 for the scored ones.
    """
    tables, lens = reference_paged.compact_tables(block_table, seq_lens, flags, block_size)
    for row, table in enumerate(tables):
        out_table[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    live = torch.tensor(lens, dtype=torch.int32, device=seq_lens.device)
    rows, scored = len(lens), (flags & SCORED).bool()
    out_lens[:rows] = live
    if out_scored is not None:
        out_scored[:rows] = live.where(scored, 0)
    if out_rest is not None:
        out_rest[:rows] = live.where(~scored, 0)
