# SPDX-License-Identifier: Apache-2.0
"""Scores of requests whose KV heads share slots become what the policies make of them, page by page."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.config.policies import EQUAL_HEADS_POLICIES
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.engine.eviction_scores import eviction_scores, known_blocks, shared_eviction_scores
from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import KVLayers, Rescores, rescore
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.policy import get_policy
from tests.kernels.triton.cases import DTYPES, NAN, bits, halves
from tests.kernels.triton.evict_laws import make_layers
from tests.kernels.triton.lane_cases import pages_of, random_owners
from tests.kernels.triton.rescore_laws import ADJUSTING, early_of, only_candidates

SHARING = [name for name in ADJUSTING if name not in EQUAL_HEADS_POLICIES]
BLOCKS, SLOTS = 26, 4
SHAPES = [  # heavy, doomed, fresh, slot: one that was never ranked, later ones, one that shares nothing
    ((7, 2, 9), (1, 11), (7, 2, 9, 1, 11), -1),
    ((6, 13, 10), (8, 12), (8, 12), 2),
    ((14, 15, 16), (17, 18), (16, 17, 18), 0),
    ((19, 20), (21,), (21,), -1),
    ((3, 4), (5,), (), 3),
]


def evictions_of(policies: list[str]) -> list[Eviction]:
    return [
        Eviction(policy, heavy, doomed, (), policy, fresh, 160 if len(fresh) < 5 else 0, 1000, 0)
        for (heavy, doomed, fresh, _), policy in zip(SHAPES, policies, strict=False)
    ]


def tables_for(evictions: list[Eviction], layers: int, heads: int) -> LaneTables:
    tables = LaneTables.empty(layers, BLOCKS, heads, SLOTS, SLOTS, "cpu")
    for table in (tables.pages, tables.offsets):
        table.fill_(-(2**30))
    gen = torch.Generator().manual_seed(3)
    for one, (*_, slot) in zip(evictions, SHAPES, strict=False):
        known = known_blocks(one)
        if slot < 0:
            continue
        owners = random_owners(layers, len(known), heads, gen)
        tables.owners[:, known] = owners.to(torch.int8)
        for layer in range(layers):
            pages = [pages_of(known, owners[layer], head) for head in range(heads)]
            ends = torch.tensor([0, *(len(mine) for mine in pages)]).cumsum(0)
            tables.offsets[layer, slot] = ends
            listed = torch.tensor([page for mine in pages for page in mine], dtype=torch.int32)
            tables.pages[layer, known] = listed.view(-1, heads)
    return tables


def candidate_pages(one: Eviction, slot: int, tables: LaneTables) -> Tensor:
    """As :func:`.shared_eviction_scores` wants them."""
    layers, _, heads = tables.owners.shape
    known, fresh = known_blocks(one), list(one.fresh_blocks)
    rows = []
    for layer in range(layers):
        for head in range(heads):
            owners = tables.owners[layer, known]
            if slot < 0:
                owners = torch.arange(heads).expand(len(known), heads)
            rows.append(pages_of(known, owners, head) + [block * heads + head for block in fresh])
    width = max(map(len, rows))
    padded = [[-1] * (width - len(row)) + row for row in rows]
    return torch.tensor(padded).view(layers, heads, width)


def by_policies(
    caches: list[Tensor], scores: Tensor, early: Tensor, evictions: list[Eviction], tables: LaneTables
) -> Tensor:  # fmt: skip
    scores = scores.clone()
    for one, (*_, slot) in zip(evictions, SHAPES, strict=False):
        pages = candidate_pages(one, slot, tables)

        def measured(
            which: int, measure: Callable[[Tensor], Tensor], pages: Tensor = pages
        ) -> Tensor:
            layers, heads, count = pages.shape
            block_size = scores.shape[3]
            found = torch.zeros(layers, heads, count, block_size)
            for layer in range(layers):
                tokens = halves(caches[layer])[which].transpose(1, 2).flatten(0, 1).float()
                for head in range(heads):
                    there = pages[layer, head] >= 0
                    mine = tokens[pages[layer, head][there]].flatten(0, 1)
                    found[layer, head, there] = measure(mine).view(-1, block_size)
            return found.flatten(2)

        shared_eviction_scores(
            get_policy(one.policy), one, scores, early, pages,
            lambda measured=measured: measured(0, reference.key_likeness),  # type: ignore[misc]
            lambda measured=measured: measured(1, reference.value_distances),  # type: ignore[misc]
        )  # fmt: skip
    return scores


@pytest.mark.parametrize("policy", [*SHARING, "all"])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "size", "block_size", "layout"),
    [("float32", 3, 16, 16, "NHD"), ("bfloat16", 2, 24, 4, "HND")],
)
def test_scores_equal_the_policies(
    policy: str, dtype: str, kv_heads: int, size: int, block_size: int, layout: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout, 2, BLOCKS, kv_heads)
    evictions = evictions_of([policy] * 5 if policy in SHARING else SHARING)
    only_candidates(caches, scores, evictions)
    # Protected tokens are known ones of the first request that shares.
    scores[:, 6, :, :3] = float("inf")
    early, got = early_of(scores), scores.clone()
    tables = tables_for(evictions, 2, kv_heads)
    layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True), 1 << 20)
    given = [rescore_of(one, slot) for one, (*_, slot) in zip(evictions, SHAPES, strict=False)]
    packed = Rescores.pack(given, "cpu")
    assert packed.shares
    before = [cache.clone() for cache in caches]
    rescore(layers, got, early, packed, tables)
    want = by_policies(caches, scores, early, evictions, tables)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, equal_nan=True)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(bits(cache), bits(old))
    fresh = [block for one in evictions for block in one.fresh_blocks]
    others = [block for block in range(BLOCKS) if block not in fresh]
    assert torch.equal(bits(got[:, others]), bits(scores[:, others]))
    assert not torch.equal(got[:, fresh], scores[:, fresh])


def test_lanes_of_others_matter() -> None:
    """If a head looked at its own lanes of the known blocks in place of those it has, it would show."""
    caches, scores = make_layers(torch.float32, 16, 4, "NHD", 2, BLOCKS, 3)
    evictions = evictions_of(["caote", "caote"])[1:]
    results = []
    for shared in (True, False):
        got, early = scores.clone(), early_of(scores)
        tables = tables_for(evictions_of(["caote"] * 2), 2, 3)
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
        get_policy("caote"), evictions[0], want, scores, blocks,
        lambda: torch.full((), NAN), lambda: reference.value_distances(values.float()),
    )  # fmt: skip
    torch.testing.assert_close(results[1], want, rtol=1e-4, atol=1e-6)
