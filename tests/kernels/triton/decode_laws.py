# SPDX-License-Identifier: Apache-2.0
"""What decode attention must do, for the interpreter's small batches and the GPU's large ones.

With ``lanes`` of rows whose KV heads share slots, in every layer of these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_vllm.kernels.triton import DecodeWorkspace, LaneTables, attend_decode
from tests.kernels.triton.cases import (
    Batch,
    assert_no_worse,
    bits,
    exact,
    plain_torch,
    row_slots,
    touched,
)
from tests.kernels.triton.lane_cases import heads_apart


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


def plan(batch: Batch, workspace: DecodeWorkspace, lanes: LaneTables | None = None) -> None:
    rows = (batch.query_start_loc, batch.seq_lens, batch.flags)
    workspace.plan(*rows, batch.block_table, batch.key_cache.shape[1], lanes)


def decode(
    batch: Batch,
    out: Tensor,
    scores: Tensor,
    workspace: DecodeWorkspace | None = None,
    lanes: LaneTables | None = None,
    layer: int = 0,
) -> None:
    """Plan, then attend in one layer."""
    workspace = workspace or workspace_for(batch)
    plan(batch, workspace, lanes)
    attend_decode(batch.given(scores, lanes, layer), out, workspace)


@dataclass
class Expected:
    """What the reference gives, and torch in the cache's dtype; ``scored``: which scores change, or might."""

    out: Tensor
    scores: Tensor
    plain_out: Tensor
    plain_scores: Tensor
    scored: Tensor
    lse: Tensor

    @classmethod
    def nothing(cls, batch: Batch, out: Tensor) -> Expected:
        lse = torch.full((batch.query.shape[1], len(batch.query)), float("nan"), device=out.device)
        scored = torch.zeros_like(batch.poisoned)
        return cls(out, batch.scores.clone(), batch.out(), batch.scores.clone(), scored, lse)

    def set_scores(self, alone: Batch, queries: slice, scores: Tensor) -> None:
        """Of one head, which is ``alone``; of plain torch, output and scores."""
        self.scored |= touched(alone, scores).view_as(self.scored)
        alone.scores.copy_(scores)
        plain = dataclasses.replace(alone, scores=self.plain_scores.view_as(scores))
        self.plain_out[:, queries], plain_scores = plain_torch(plain)
        plain.scores.copy_(plain_scores)

    def check_scores(self, batch: Batch, scores: Tensor, scored: Tensor, floor: float) -> None:
        """Those that are not ``scored`` stay as they were."""
        others = torch.where(scored, batch.scores, scores)
        assert torch.equal(bits(others), bits(batch.scores))
        all_scores = (scores, self.scores, self.plain_scores)
        assert_no_worse(*(torch.where(scored, one, 0.0) for one in all_scores), floor)

    def check_out(self, out: Tensor, tokens: list[int], floor: float) -> None:
        """Those that are not among ``tokens`` stay as they were."""
        others = set(range(len(out))).difference(tokens)
        assert out[sorted(others)].isnan().all()
        assert_no_worse(out[tokens], self.out[tokens], self.plain_out[tokens], floor)


def check_decode(
    batch: Batch, workspace: DecodeWorkspace | None = None, lanes: LaneTables | None = None
) -> None:
    """Output and scores of the rows with one query equal the reference, all else stays as it was."""
    layers = 0 if lanes is None else len(lanes.pages)
    workspace = workspace or workspace_for(batch, layers=layers)
    plan(batch, workspace, lanes)
    unscored = _unscored(batch, workspace.tile)
    starts = batch.query_start_loc.tolist()
    attended = [
        starts[row] for row, (length, count) in enumerate(batch.lengths) if length and count == 1
    ]
    for layer in range(max(1, layers)):
        out, scores = batch.out(), batch.scores.clone()
        attend_decode(batch.given(scores, lanes, layer), out, workspace)
        want = Expected.nothing(batch, batch.out())
        for queries, alone in heads_apart(batch, lanes, layer, want.scores):
            want.out[:, queries], exact_scores = exact(alone)
            want.set_scores(alone, queries, exact_scores)
        low = out.dtype != torch.float32
        # Storing the exact value in this dtype rounds it: the tolerance allows that much.
        want.check_out(out, attended, 1e-3 if low else 4e-6)
        # Per probability, the scratch's float16 costs 2^-11 where q and k are no better than that.
        want.check_scores(batch, scores, want.scored & ~unscored, 5e-4 if low else 2e-6)


def _unscored(batch: Batch, tile: int) -> Tensor:
    """[N, KH, BS], bool: pinned tokens, in whole tiles: every head's own, or all that a row has."""
    slots = torch.zeros_like(batch.poisoned)
    pinned = torch.tensor(batch.pinned, dtype=torch.int32, device=slots.device) // tile * tile
    if batch.pinned:
        begun = dataclasses.replace(batch, seq_lens=torch.minimum(batch.seq_lens, pinned))
        for row in range(len(pinned)):
            slots |= row_slots(begun, row)
    return slots
