# SPDX-License-Identifier: Apache-2.0
"""What compaction must do, for the interpreter's small caches and the GPU's large ones."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_vllm.kernels.lanes import compact as rule
from h2o_vllm.kernels.triton import Compaction, Evictions, KVLayers, compact
from tests.kernels.triton.cases import bits, halves

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan"), 1e-40, -1.5]
)


def make_layers(
    dtype: torch.dtype = torch.float32,
    size: int = 64,
    block_size: int = 16,
    layout: str = "NHD",
    layers: int = 3,
    blocks: int = 12,
    kv_heads: int = 2,
    device: str = "cpu",
) -> tuple[list[Tensor], Tensor]:
    """Caches [N, KH, BS, 2 * D] of some layers, and scores."""
    gen = torch.Generator().manual_seed(0)
    shape = (blocks, kv_heads, block_size, 2 * size)
    if layout == "NHD":
        shape = (blocks, block_size, kv_heads, 2 * size)
    caches = [torch.randn(shape, generator=gen).to(dtype).to(device) for _ in range(layers)]
    if layout == "NHD":
        caches = [cache.transpose(1, 2) for cache in caches]
    scores = torch.rand(layers, blocks, kv_heads, block_size, generator=gen)
    return caches, scores.to(device)


def check_compact(
    caches: list[Tensor],
    scores: Tensor,
    pairs: list[tuple[list[int], list[int]]],
    scratch_bytes: int = 1 << 20,
) -> None:
    """Caches and scores equal the reference's, bit for bit; blocks that are not heavy stay as they were."""
    got, want = ([cache.clone() for cache in caches] for _ in range(2))
    got_scores, want_scores = scores.clone(), scores.clone()
    layers = KVLayers(*zip(*(halves(cache) for cache in got), strict=True), scratch_bytes)
    compact(
        layers, got_scores, Evictions.pack([Compaction(*pair) for pair in pairs], scores.device)
    )
    split = list(zip(*(halves(cache) for cache in want), strict=True))
    for pair in pairs:
        rule(*split, want_scores, *pair)
    assert torch.equal(bits(got_scores), bits(want_scores))
    heavy = {block for heavy, doomed in pairs if doomed for block in heavy}
    untouched = [block for block in range(scores.shape[1]) if block not in heavy]
    assert torch.equal(bits(got_scores[:, untouched]), bits(scores[:, untouched]))
    for a, b, before in zip(got, want, caches, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert torch.equal(bits(a[untouched]), bits(before[untouched]))
