# SPDX-License-Identifier: Apache-2.0
"""One launch makes of a step's scores what the policies would in plain torch, eviction by eviction."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.kernels.triton import KVLayers, Rescore, Rescores, rescore, rescores
from h2o_vllm.policy.candidates import Candidates, head_number
from h2o_vllm.policy.formulas import random
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import Op
from tests.kernels.triton.cases import DTYPES, NAN, halves
from tests.kernels.triton.evict_laws import make_layers
from tests.kernels.triton.rescore_laws import (
    ADJUSTING,
    by_formulas,
    check_rescore,
    early_of,
    predicting,
)

MODULE, RANKS = (f"h2o_vllm.kernels.triton.{name}" for name in ("rescore", "ranks"))
BLOCKS = 26
THREE = "value+end+key"
EXACT = ("mean", "end", "end+key", "attention+mean", "mean+end")
"""Add nothing up, or only what ranks are made of."""


def evictions_of(policies: list[str]) -> list[Eviction]:
    """Ragged, no block in two: a first eviction, a later one, one that ranks nothing fresh, ..."""
    shapes = [  # heavy, doomed, fresh
        ((7, 2, 9), (1, 11, 4, 3, 5, 24), (7, 2, 9, 1, 11, 4, 3, 5, 24)),
        ((6, 13), (8,), (8,)),
        ((10,), (12,), ()),
        ((14, 15, 16), (17, 18), (16, 17, 18)),
        ((19,), (20, 21), (19, 20, 21)),
    ]
    evictions = []
    for (heavy, doomed, fresh), policy in zip(shapes, policies, strict=False):
        first = len(fresh) == len(heavy) + len(doomed)
        evictions.append(
            Eviction(
                policy, heavy, doomed, (), Policy.parse(policy).indices(), fresh, 0 if first else 160, 1000
            )
        )  # fmt: skip
    return evictions


@pytest.mark.parametrize("policy", ADJUSTING)
@pytest.mark.parametrize(
    ("dtype", "size", "block_size", "layout"),
    [("bfloat16", 80, 32, "HND"), ("float32", 64, 16, "NHD"), ("float16", 256, 16, "NHD")],
)
def test_scores_and_kept_tokens_equal_the_policies(
    policy: str, dtype: str, size: int, block_size: int, layout: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout, 2, BLOCKS)
    evictions = evictions_of([policy] * 5)
    after = check_rescore(caches, scores, evictions, exact=policy in EXACT)
    fresh = [block for one in evictions for block in one.fresh_blocks]
    assert not torch.equal(after[:, fresh], scores[:, fresh])


@pytest.mark.parametrize("block_size", [16, 64])
def test_one_launch_takes_all_policies(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    class Counting:
        def __init__(self, module: str, name: str) -> None:
            self.name, self.kernel = name, getattr(sys.modules[module], name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(self.name)
            return self.kernel[grid]

    monkeypatch.setattr(sys.modules[MODULE], "_rescore", Counting(MODULE, "_rescore"))
    for name in ("_sort_tiles", "_find_places", "_settle_scores"):
        monkeypatch.setattr(sys.modules[RANKS], name, Counting(RANKS, name))
    caches, scores = make_layers(torch.bfloat16, 64, block_size, layers=3, blocks=BLOCKS)
    check_rescore(caches, scores.clone(), evictions_of([THREE, *ADJUSTING[:4]]))
    assert launches == ["_rescore", "_sort_tiles", "_find_places", "_settle_scores"]
    launches.clear()
    few = evictions_of([THREE] * 2)[1:]
    check_rescore(caches, scores.clone(), few)
    assert launches == ["_rescore", "_sort_tiles", "_settle_scores"]
    launches.clear()
    check_rescore(caches, scores.clone(), evictions_of(["key", "mean", "key"]))
    assert launches == ["_rescore"]
    launches.clear()
    check_rescore(caches, scores, [])
    assert not launches


def test_scores_of_others_mean_nothing() -> None:
    """What ranks by keys may have read its first blocks from the cache, with whatever scores they have."""
    caches, scores = make_layers(blocks=BLOCKS)
    evictions = evictions_of(["key"] * 2)
    scores[:, evictions[0].fresh_blocks[1]] = float("inf")
    scores[:, evictions[0].fresh_blocks[2]] = NAN
    after = check_rescore(caches, scores, evictions)
    assert after[:, list(evictions[0].fresh_blocks)].isfinite().all()


@pytest.mark.parametrize("policy", ADJUSTING)
@pytest.mark.parametrize("seed", [1, 0])
def test_ties_are_broken_as_in_the_policies(policy: str, seed: int) -> None:
    """Few different keys, values and scores; numbers of which sums are exact."""
    caches, scores = make_layers(size=64, blocks=BLOCKS)
    gen = torch.Generator().manual_seed(seed)
    for cache in caches:
        for half in halves(cache):
            which = torch.randint(0, 3, half.shape[:3], generator=gen)
            half.copy_(torch.eye(64)[which])
    scores = torch.randint(0, 2, scores.shape, generator=gen).float()
    after = check_rescore(caches, scores, evictions_of([policy] * 5))
    for one in evictions_of([policy]):
        fresh = after[0, list(one.fresh_blocks), 0].flatten()
        # What is predicted is more for later tokens.
        assert policy.startswith("predicted") or len(fresh.unique()) < len(fresh)


def test_random_draws_are_those_of_the_formula() -> None:
    """Known and fresh tokens alike, whatever their scores, and the same from any first head on."""
    caches, scores = make_layers(torch.bfloat16, 64, 16, layers=3, blocks=BLOCKS)
    layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True), 1 << 20)
    for heads in (0, 6, head_number(5, 2)):
        got = torch.full_like(scores, NAN)
        one = Rescore((3, 5), (1, 2, 9), Op.RANDOM, 160, 1000, first_head=heads)
        rescore(layers, got, scores, Rescores.pack([one], "cpu"))
        mine = got[:, [3, 5, 1, 2, 9]].transpose(1, 2).flatten(2)
        nothing: Any = None
        given = Candidates(mine, 32, 160, 1000, nothing, nothing, first_head=heads)
        assert torch.equal(mine, random(given))
        assert got.isnan().sum() == 3 * 2 * 16 * (BLOCKS - 5)


def test_keys_of_any_length_and_none() -> None:
    caches, scores = make_layers(blocks=BLOCKS)
    for cache in caches:
        cache.mul_(torch.logspace(-6, 6, BLOCKS)[:, None, None, None])
        cache[7, :, :3] = 0
    check_rescore(caches, scores, evictions_of(["key", "value+key", THREE, "end+key", "value"]))


def test_a_small_scratch_takes_more_launches() -> None:
    caches, scores = make_layers(torch.bfloat16, 64, 16, blocks=BLOCKS)
    evictions = evictions_of(["end+key", "value+key", "key"])
    # Bytes: of two heads, of nine blocks of fresh tokens.
    one_layer = 4 * 2 * (rescores.lists_of(2) * 9 * 16 + rescores.sums_of(1, 64))
    check_rescore(caches, scores.clone(), evictions, scratch_bytes=2 * one_layer)
    with pytest.raises(ValueError, match="do not fit"):
        check_rescore(caches, scores, evictions, scratch_bytes=one_layer - 8)


def test_an_8_bit_cache_is_rescored() -> None:
    caches, scores = make_layers(torch.float8_e4m3fn, 80, 16, blocks=BLOCKS)
    wide = [cache.float() for cache in caches]
    evictions = evictions_of(ADJUSTING[-5:])
    got = scores.clone()
    layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True))
    early = early_of(scores)
    packed = Rescores.pack([rescore_of(one) for one in evictions], "cpu")
    part, prediction = predicting(packed, layers, None)
    rescore(layers, got, early, packed, prediction=prediction)
    want = by_formulas(wide, scores, early, evictions, part)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
