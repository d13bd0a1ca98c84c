# SPDX-License-Identifier: Apache-2.0
"""What prompt scores must be, for the interpreter's small batches and the GPU's large ones."""

from __future__ import annotations

import dataclasses

import torch

from h2o_vllm.kernels.triton import add_prompt_scores
from tests.kernels.cpu.cases import assert_no_worse
from tests.kernels.triton.cases import Batch, bits, exact_prompt, plain_torch


def check_prompt(
    batch: Batch,
    rows: list[int] | None = None,
    transposed: bool = False,
    last: list[int] | None = None,
) -> None:
    """Scores of the rows with several queries equal the reference, the others stay as they were.

    Args:
        last: how many of each row's queries are scored; all if left out.
    """
    asked = batch
    if rows is not None:
        lens = torch.zeros_like(batch.seq_lens)
        lens[rows] = batch.seq_lens[rows]
        asked = dataclasses.replace(batch, seq_lens=lens)
    lse, _ = exact_prompt(batch)
    scored_from = None
    if last is not None:
        counts = torch.tensor(last, dtype=torch.int32, device=lse.device)
        scored_from = batch.query_start_loc[1:] - counts
    _, want = exact_prompt(asked, scored_from)
    _, plain = plain_torch(asked)
    if transposed:
        lse = lse.T.contiguous().T
    scores = batch.scores.clone()
    lengths = batch.lengths
    add_prompt_scores(
        batch.query, batch.key_cache, scores, batch.block_table, batch.query_start_loc, batch.seq_lens,
        lse, batch.scale, max(count for _, count in lengths), max(length for length, _ in lengths),
        None if rows is None else torch.tensor(rows, dtype=torch.int32, device=scores.device),
        *batch.device_scales[:2], scored_from=scored_from,
    )  # fmt: skip
    scored = bits(want) != bits(batch.scores)
    assert torch.equal(bits(scores[~scored]), bits(batch.scores[~scored]))
    if last is None:
        assert_no_worse(scores[scored], want[scored], plain[scored], 4e-6)
    else:  # plain torch knows no last queries
        torch.testing.assert_close(scores[scored], want[scored], rtol=1e-5, atol=4e-6)
