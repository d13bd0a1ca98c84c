# SPDX-License-Identifier: Apache-2.0
"""Warming up changes nothing."""

from __future__ import annotations

import torch

from h2o_vllm.kernels.triton import DecodeWorkspace, KVLayers, warm_up
from tests.kernels.triton.cases import bits, halves
from tests.kernels.triton.evict_laws import make_layers


def test_warming_up_changes_nothing() -> None:
    caches, scores = make_layers()
    planes = torch.stack([scores, scores / 2])
    before, planes_before = [cache.clone() for cache in caches], planes.clone()
    layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True))
    query = torch.randn(2, 6, 64)
    out = query.clone()
    workspace = DecodeWorkspace(4, 12 * 16, 6, 2, torch.float32, 64, "cpu")
    warm_up(layers, planes, workspace, query, out)
    warm_up(layers, planes, workspace, query, out, softcap=30.0, sinks=torch.ones(6))
    assert torch.equal(query, out)
    assert torch.equal(bits(planes), bits(planes_before))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(caches, before, strict=True))
