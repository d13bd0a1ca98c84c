# SPDX-License-Identifier: Apache-2.0
"""Scores are split in the listed rows only."""

from __future__ import annotations

import torch

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import split_scores
from tests.kernels.triton.cases import bits, make_batch


def test_splitting_equals_the_reference() -> None:
    batch = make_batch([40, 0, 70, 16, 33], [1, 0, 5, 1, 1], kv_heads=3, group=1)
    scores = torch.stack([batch.scores, batch.scores * 2])
    late = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0))
    before, got, want = scores.clone(), late.clone(), late.clone()
    given = (batch.block_table, batch.seq_lens, torch.tensor([2, 3, 1], dtype=torch.int32))
    reference.split_scores(scores, want, *given)
    split_scores(scores, got, *given, 70)
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(bits(scores), bits(before))
    changed = {
        block for block in range(scores.shape[1]) if not torch.equal(got[:, block], late[:, block])
    }
    assert changed == {*batch.block_table[2, :5].tolist(), *batch.block_table[3, :1].tolist()}
