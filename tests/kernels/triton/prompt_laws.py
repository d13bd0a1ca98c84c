# SPDX-License-Identifier: Apache-2.0
"""What log-sum-exps and scores of prompts must be, for the interpreter's batches and the GPU's large ones."""

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.kernels.triton import PromptSegments, add_prompt_scores, attend_prompts
from h2o_vllm.kernels.triton.segments import cuts
from tests.kernels.triton.cases import (
    Batch,
    assert_no_worse,
    bits,
    exact_prompt,
    plain_torch,
    touched,
)


def prompts_of(batch: Batch) -> list[int]:
    """Numbers of the rows with several queries."""
    return [row for row, (length, count) in enumerate(batch.lengths) if length and count > 1]


def segments_of(
    batch: Batch, rows: list[int] | None = None, holes: list[int] | None = None, **options: Any
) -> PromptSegments:
    """As the metadata builder makes them, see :func:`check_prompt`."""
    rows = prompts_of(batch) if rows is None else rows
    lengths, starts = batch.lengths, batch.query_start_loc.tolist()
    return PromptSegments.cut(
        rows, [starts[row] for row in rows], [starts[row + 1] for row in rows],
        [lengths[row][0] + (holes[row] if holes else 0) for row in rows],
        [lengths[row][0] for row in rows],
        batch.key_cache.shape[2], batch.scores.device, **options,
    )  # fmt: skip


def add_scores(batch: Batch, scores: Tensor, lse: Tensor, prompts: PromptSegments) -> None:
    if prompts.partial is not None:
        prompts.partial.fill_(float("nan"))
    add_prompt_scores(batch.given(scores), lse, prompts)


def check_prompt(batch: Batch, *, transposed: bool = False, **options: Any) -> PromptSegments:
    """Log-sum-exps and scores of the rows with several queries equal the reference; all else stays as it was.

    Args:
        options: ``holes``, tokens that each row has lost before; what :meth:`.PromptSegments.cut` takes.

    Returns:
        How the rows were cut.
    """
    lse, want = exact_prompt(batch)
    _check_lse(batch, lse, transposed)
    _, plain = plain_torch(batch)
    if transposed:
        lse = lse.T.contiguous().T
    scores = batch.scores.clone()
    prompts = segments_of(batch, **options)
    add_scores(batch, scores, lse, prompts)
    scored = touched(batch, want)
    assert torch.equal(bits(scores[~scored]), bits(batch.scores[~scored]))
    assert_no_worse(scores[scored], want[scored], plain[scored], 4e-6)
    return prompts


def _check_lse(batch: Batch, want: Tensor, transposed: bool) -> None:
    out = torch.full_like(want, float("nan"))
    if transposed:
        out = out.T.contiguous().T
    starts, rows = batch.query_start_loc.tolist(), prompts_of(batch)
    listed = torch.tensor(rows[::-1], dtype=torch.int32, device=out.device)
    longest = max((count for _, count in batch.lengths), default=0)
    attend_prompts(batch.given(batch.scores), listed, longest, out)
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    others = sorted({*range(len(batch.query))}.difference(tokens))
    assert out[:, others].isnan().all()
    torch.testing.assert_close(out[:, tokens], want[:, tokens], rtol=1e-5, atol=1e-5)


def check_prompt_alone(batch: Batch) -> None:
    """However a prompt is launched, its scores are the same bit for bit.

    In its batch; alone; with room for one row's partial sums only; in chunks that end where it is cut.
    """
    lse, _ = exact_prompt(batch)
    want = batch.scores.clone()
    add_scores(batch, want, lse, together := segments_of(batch))
    assert len(together.launches) == 1
    most = max(_partial_sums(batch, row) for row in range(len(batch.seq_lens)))
    tight = segments_of(batch, scratch_bytes=4 * most)
    assert len(tight.launches) > 1
    again = batch.scores.clone()
    add_scores(batch, again, lse, tight)
    assert torch.equal(bits(again), bits(want))
    alone, chunked = batch.scores.clone(), batch.scores.clone()
    for row, (length, count) in enumerate(batch.lengths):
        add_scores(batch, alone, lse, segments_of(batch, [row]))
        at = int(batch.query_start_loc[row])
        for first, end in pairwise(cuts(length - count, length)):
            gone = length - end
            chunk = dataclasses.replace(
                batch,
                query=batch.query[at : at + end - first],
                query_start_loc=torch.tensor(
                    [0, end - first], dtype=torch.int32, device=lse.device
                ),
                seq_lens=batch.seq_lens[row : row + 1] - gone,
                block_table=batch.block_table[row : row + 1],
            )
            add_scores(chunk, chunked, lse[:, at : at + end - first], segments_of(chunk))
            at += end - first
    assert torch.equal(bits(alone), bits(want))
    assert torch.equal(bits(chunked), bits(want))


def _partial_sums(batch: Batch, row: int) -> int:
    partial = segments_of(batch, [row]).partial
    return 0 if partial is None else partial.numel()
