# SPDX-License-Identifier: Apache-2.0
"""Scores of requests whose KV heads share slots become what the policies make of them, page by page."""

from __future__ import annotations

import pytest
import torch

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.engine.worker.eviction_scores import eviction_scores, known_blocks
from h2o_vllm.kernels import reference
from h2o_vllm.kernels.lanes import own_pages
from h2o_vllm.kernels.triton import KVLayers, Rescores, rescore
from h2o_vllm.policy.policy import Policy
from tests.kernels.triton.cases import DTYPES, NAN, halves
from tests.kernels.triton.evict_laws import make_layers
from tests.kernels.triton.lane_rescore_laws import SHARING, check_lane_rescore, known_lanes
from tests.kernels.triton.rescore_laws import early_of

BLOCKS = 26
SHAPES = [  # heavy, doomed, fresh, slot: one that was never ranked, later ones, one that shares nothing
    ((7, 2, 9), (1, 11), (7, 2, 9, 1, 11), -1),
    ((6, 13, 10), (8, 12), (8, 12), 2),
    ((14, 15, 16), (17, 18), (16, 17, 18), 0),
    ((19, 20), (21,), (21,), -1),
    ((3, 4), (5,), (), 3),
]
SLOTS = [slot for *_, slot in SHAPES]


def evictions_of(policies: list[str]) -> list[Eviction]:
    return [
        Eviction(
            policy,
            heavy,
            doomed,
            (),
            Policy.parse(policy).indices(),
            fresh,
            160 if len(fresh) < 5 else 0,
            1000,
        )
        for (heavy, doomed, fresh, _), policy in zip(SHAPES, policies, strict=False)
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [*SHARING, "all"])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "size", "block_size", "layout"),
    [("float32", 3, 16, 16, "NHD"), ("bfloat16", 2, 24, 4, "HND")],
)
def test_scores_equal_the_policies(
    policy: str, dtype: str, kv_heads: int, size: int, block_size: int, layout: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout, 2, BLOCKS, kv_heads)
    evictions = evictions_of([policy] * 5 if policy in SHARING else SHARING[-5:])
    check_lane_rescore(caches, scores, evictions, SLOTS[: len(evictions)])


def test_lanes_of_others_matter() -> None:
    """If a head looked at its own lanes of the known blocks in place of those it has, it would show."""
    caches, scores = make_layers(torch.float32, 16, 4, "NHD", 2, BLOCKS, 3)
    both = evictions_of(["value", "value"])
    evictions = both[1:]
    results = []
    for shared in (True, False):
        got, early = scores.clone(), early_of(scores)
        tables = known_lanes(both, SLOTS[:2], 2, BLOCKS, 3)
        layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True), 1 << 20)
        packed = Rescores.pack([rescore_of(evictions[0], 2 if shared else -1)], "cpu")
        rescore(layers, got, early, packed, tables)
        results.append(got)
    assert not torch.allclose(*results)
    blocks = torch.tensor([*known_blocks(evictions[0]), *evictions[0].fresh_blocks])
    want = scores.clone()
    values = torch.stack(
        [halves(cache)[1][blocks].flatten(0, 1).transpose(0, 1) for cache in caches]
    )
    eviction_scores(
        evictions[0], want, scores, own_pages(2, blocks.tolist(), 3),
        lambda: torch.full((), NAN), lambda: reference.value_distances(values.float()),
    )  # fmt: skip
    torch.testing.assert_close(results[1], want, rtol=1e-4, atol=1e-6)
