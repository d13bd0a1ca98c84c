# SPDX-License-Identifier: Apache-2.0
"""Scores of prompt chunks: column sums of the causal softmax, given each query's log-sum-exp."""

from __future__ import annotations

from torch import Tensor

from h2o_vllm.kernels import reference_paged

__all__ = ["add_prompt_scores"]


def add_prompt_scores(
    query: Tensor,
    key_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    lse: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    rows: Tensor | None = None,
) -> None:
    """Add the probabilities that each key receives from its row's queries. Eager.

    The queries of a row are the last positions of its live sequence; there may be context before them
    (chunked prefill, prefix-cache hit). Rows with one query or length 0 are left alone.

    Args:
        query: [T, H, D]; may be strided along T.
        key_cache: [N, BS, KH, D], any strides with a last one of 1; dtype of ``query``.
        scores: [N, KH, BS], float32, contiguous.
        block_table: [B, MB], int32, without holes. query_start_loc: [B + 1], int32.
        seq_lens: [B], int32, live lengths including the chunk.
        lse: [H, T], float32, any strides: natural log of the sum of exp(scaled logits) of each query.
        scale: factor on q.k before the softmax.
        max_query_len, max_seq_len: no row of this call has more; host numbers, they size the grid.
        rows: [R], int32: the rows to look at, each once; all if left out. Saves launching empty programs.
    """
    del max_query_len, max_seq_len
    if rows is not None:
        chosen = seq_lens.new_zeros(seq_lens.shape)
        chosen[rows.long()] = seq_lens[rows.long()]
        seq_lens = chosen
    reference_paged.add_prompt_scores(
        query, key_cache, scores, block_table, query_start_loc, seq_lens, lse, scale
    )
