# SPDX-License-Identifier: Apache-2.0
"""What decode attention must do, for the interpreter's small batches and the GPU's large ones."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_vllm.kernels.triton import DecodeWorkspace, attend_decode
from tests.kernels.triton.cases import Batch, assert_no_worse, bits, exact, plain_torch, touched


def workspace_for(
    batch: Batch, spare: int | None = 4, rows: int = 0, tokens: int | None = None, layers: int = 0
) -> DecodeWorkspace:
    """As the worker makes it; ``spare`` small, so that the interpreter's rows are cut as well.

    Args:
        layers: with heads that may share slots.
    """
    blocks, block_size, kv_heads, size = batch.key_cache.shape
    workspace = DecodeWorkspace(
        max(rows, len(batch.seq_lens)), blocks * block_size if tokens is None else tokens,
        batch.query.shape[1], kv_heads, batch.out().dtype, size, batch.query.device, spare,
        sharing_layers=layers,
    )  # fmt: skip
    for name in ("part_out", "part_max", "part_sum", "probs", "tile_max"):
        getattr(workspace, name).fill_(float("nan"))
    return workspace


def decode(
    batch: Batch, out: Tensor, scores: Tensor, workspace: DecodeWorkspace | None = None
) -> None:
    workspace = workspace or workspace_for(batch)
    workspace.plan(batch.query_start_loc, batch.seq_lens, batch.flags)
    attend_decode(batch.given(scores), out, workspace)


def check_decode(batch: Batch, workspace: DecodeWorkspace | None = None) -> None:
    """Output and scores of the rows with one query equal the reference, all else stays as it was."""
    out, scores = batch.out(), batch.scores.clone()
    decode(batch, out, scores, workspace)
    want, want_scores = exact(batch)
    plain, plain_scores = plain_torch(batch)
    attended = ~want[:, 0, 0].isnan()
    assert out[~attended].isnan().all()
    low = out.dtype != torch.float32
    # What the exact value loses by being stored in this dtype is nobody's fault.
    assert_no_worse(out[attended], want[attended], plain[attended], 1e-3 if low else 4e-6)
    scored = touched(batch, want_scores)
    assert torch.equal(bits(scores[~scored]), bits(batch.scores[~scored]))
    # Per probability, the scratch's float16 costs 2^-11 where q and k are no better than that.
    assert_no_worse(
        scores[scored], want_scores[scored], plain_scores[scored], 5e-4 if low else 2e-6
    )
