# SPDX-License-Identifier: Apache-2.0
"""What new scores cost on a GPU before an eviction: 32 layers of an 8B model, by one call and in torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.engine.worker.eviction_scores import candidate_blocks, eviction_scores
from h2o_vllm.kernels.lanes import own_pages
from h2o_vllm.kernels.triton import KVLayers, Rescores, rescore
from h2o_vllm.policy.policy import Policy
from loadtest.kernels.compaction import BLOCK_SIZE, HEAD_SIZE, KV_HEADS, LAYERS
from loadtest.kernels.timing import Call


@dataclass(frozen=True)
class Rescoring:
    """Evictions rank each request's ``length`` tokens, ``fresh`` blocks of which for the first time."""

    policy: str
    requests: int
    length: int
    fresh: int

    def build(self) -> dict[str, Call]:
        """The calls to time; torch goes eviction by eviction, as a worker without the kernel would."""
        per_row = self.length // BLOCK_SIZE
        blocks = self.requests * per_row + 1
        kv = torch.randn(
            LAYERS, blocks, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16, device="cuda"
        )
        keys, values = kv.split(HEAD_SIZE, dim=-1)
        scores = torch.rand(LAYERS, blocks, KV_HEADS, BLOCK_SIZE, device="cuda")
        early = scores * torch.rand_like(scores)
        layers = KVLayers(list(keys), list(values))
        rows = (torch.randperm(blocks - 1) + 1).view(self.requests, per_row).tolist()
        ranks = Policy.parse(self.policy).indices()
        evictions = [
            Eviction(
                str(at), tuple(row[1:]), tuple(row[:1]), (), ranks, tuple(row[-self.fresh :]),
                fresh_from=self.length, seen=4 * self.length,
            )
            for at, row in enumerate(rows)
        ]  # fmt: skip
        packed = Rescores.pack([rescore_of(one) for one in evictions], "cuda")
        before = scores.clone()

        def ours() -> None:
            scores.copy_(before)
            rescore(layers, scores, early, packed)

        def in_torch() -> None:
            scores.copy_(before)
            for one in evictions:
                mine = candidate_blocks(one)
                there = torch.tensor(mine, device="cuda")
                measures = partial(_similarity, keys, there), partial(_distances, values, there)
                pages = own_pages(LAYERS, mine, KV_HEADS).cuda()
                eviction_scores(one, scores, early, pages, *measures)

        return {"ours": ours, "torch": in_torch, "reset alone": lambda: scores.copy_(before)}

    def moved_bytes(self) -> dict[str, int]:
        """The least that each call has to read and write: keys, values or both once, and scores."""
        vectors = 1 if self.policy in ("key", "value") else 2
        tokens = self.requests * self.length * LAYERS * KV_HEADS
        fresh = self.requests * self.fresh * BLOCK_SIZE * LAYERS * KV_HEADS
        written = tokens if self.policy == "key" else fresh
        reset = 2 * 4 * (tokens + LAYERS * KV_HEADS * BLOCK_SIZE)
        least = vectors * tokens * 2 * HEAD_SIZE + 2 * 4 * written + reset
        return {"ours": least, "torch": least, "reset alone": reset}


def _similarity(keys: Tensor, blocks: Tensor) -> Tensor:
    directions = F.normalize(_tokens(keys, blocks), dim=-1)
    return (directions * F.normalize(directions.sum(2, keepdim=True), dim=-1)).sum(-1)


def _distances(values: Tensor, blocks: Tensor) -> Tensor:
    found = _tokens(values, blocks)
    return torch.linalg.vector_norm(found - found.mean(2, keepdim=True), dim=-1)


def _tokens(cache: Tensor, blocks: Tensor) -> Tensor:
    """[L, KH, C, D], float32."""
    return cache[:, blocks].flatten(1, 2).transpose(1, 2).float()


RESCORINGS = tuple(
    Rescoring(policy, *sizes)
    for policy in ("key", "value", "value+key", "value+end+key")
    for sizes in ((1, 1024, 1), (16, 1024, 1), (1, 8192, 512))
)
