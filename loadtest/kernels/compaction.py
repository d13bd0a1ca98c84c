# SPDX-License-Identifier: Apache-2.0
"""What an eviction costs on a GPU: all 32 layers of an 8B model compacted by one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from h2o_vllm.kernels.triton import Compaction as Eviction
from h2o_vllm.kernels.triton import Evictions, KVLayers, compact
from loadtest.kernels.timing import Call

BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_SIZE = 16, 32, 8, 128


@dataclass(frozen=True)
class Compaction:
    """``doomed`` blocks of each request's ``length`` tokens go; its others are heavy."""

    requests: int
    length: int
    doomed: int

    def build(self) -> dict[str, Call]:
        """The calls to time; the second is what the first does besides."""
        per_row = self.length // BLOCK_SIZE
        blocks = self.requests * per_row + 1
        kv = torch.randn(
            LAYERS, blocks, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16, device="cuda"
        )
        keys, values = kv.split(HEAD_SIZE, dim=-1)
        scores = torch.rand(LAYERS, blocks, KV_HEADS, BLOCK_SIZE, device="cuda")
        layers = KVLayers(list(keys), list(values))
        rows = (torch.randperm(blocks - 1) + 1).view(self.requests, per_row).tolist()
        evictions = [Eviction(row[self.doomed :], row[: self.doomed]) for row in rows]
        packed = Evictions.pack(evictions, "cuda")
        # A second run over the same scores moves again as many: doomed blocks are only read.
        before = scores.clone()

        def run() -> None:
            scores.copy_(before)
            compact(layers, scores, packed)

        return {"ours": run, "reset alone": lambda: scores.copy_(before)}

    def moved_bytes(self) -> dict[str, int]:
        """The least that each call has to read and write."""
        score_bytes = (
            4 * LAYERS * (self.requests * (self.length // BLOCK_SIZE) + 1) * KV_HEADS * BLOCK_SIZE
        )
        room = self.length - self.doomed * BLOCK_SIZE
        # With random scores the share of the doomed tokens that survives is that of the room.
        heads = self.requests * LAYERS * KV_HEADS
        moves = heads * self.doomed * BLOCK_SIZE * room // self.length
        read = heads * self.length * 4
        return {
            "ours": moves * 2 * (4 * HEAD_SIZE + 4) + read + 2 * score_bytes,
            "reset alone": 2 * score_bytes,
        }


COMPACTIONS = (Compaction(1, 2048, 1), Compaction(16, 2048, 1), Compaction(1, 8192, 410))
