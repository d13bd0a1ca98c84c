# SPDX-License-Identifier: Apache-2.0
"""Decode attention over paged KV that also adds each key's probability to the scores."""

from __future__ import annotations

from torch import Tensor

from h2o_vllm.kernels import reference_paged
from h2o_vllm.kernels.triton.plan import DecodeWorkspace

__all__ = ["attend_decode"]


def attend_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    scale: float,
    out: Tensor,
    workspace: DecodeWorkspace,
) -> None:
    """Attention of the planned rows' single queries; their probabilities are added to ``scores``.

    Which rows, and how long they are, is what the last :meth:`.DecodeWorkspace.plan` was told. Output and
    scores of all other rows stay as they are. May be captured in a CUDA graph: the grid depends on B alone.

    Args:
        query: [T, H, D]; may be strided along T.
        key_cache, value_cache: [N, BS, KH, D], any strides with a last one of 1; dtype of ``query``.
        scores: [N, KH, BS], float32, contiguous; receives probabilities summed over the q heads of a group.
        block_table: [B, MB], int32, without holes. May be strided along B.
        scale: factor on q.k before the softmax.
        out: [T, H, D]; only the planned rows' tokens are written. May be strided along T.
    """
    rows = block_table.shape[0]
    reference_paged.attend_decode(
        query, key_cache, value_cache, scores, block_table, workspace.query_start_loc[: rows + 1],
        workspace.seq_lens[:rows], scale, out,
    )  # fmt: skip
