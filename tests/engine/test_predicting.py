# SPDX-License-Identifier: Apache-2.0
"""What the worker predicts is what calibration's rooms say of the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration import features as room
from h2o_vllm.calibration import regression
from h2o_vllm.calibration.features import Rotation, features, num_features
from h2o_vllm.calibration.file import Calibration, Traits
from h2o_vllm.engine.cpu.predicting import predicted
from h2o_vllm.kernels.cpu.batch import key_value_views, tokens_of

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 2, 80, 2, 32, 16

ROTATIONS = [Rotation(SIZE), Rotation(SIZE, True), Rotation(12), Rotation(4, True), Rotation(0)]


@pytest.fixture(params=[False, True], ids=["all-heads", "own-heads"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(room, "MOST", 0 if request.param else 1 << 20)
    return bool(request.param)


def caches_of() -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(BLOCKS, HEADS, BLOCK, 2 * SIZE, generator=source) for _ in range(LAYERS)]


def calibration_of(rotation: Rotation, weights: Tensor | None = None) -> Calibration:
    if weights is None:
        count = num_features(HEADS, SIZE, SIZE, rotation)
        source = torch.Generator().manual_seed(4)
        weights = torch.randn(LAYERS, HEADS, count + 1, generator=source) * 0.1
        weights[..., -1] = -4.0
    return Calibration(weights, Traits(LAYERS, HEADS, SIZE, SIZE, rotation, torch.ones(1)))


def said(calibration: Calibration, kv_caches: list[Tensor], blocks: tuple[int, ...]) -> Tensor:
    """By features and regression, [L, KH, n * BS]."""
    found = []
    for weights, cache in zip(calibration.weights, kv_caches, strict=True):
        keys, values = key_value_views(cache[list(blocks)])
        keys, values = keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
        found.append(
            regression.predicted(weights, features(keys, values, calibration.traits.rotation))
        )
    return torch.stack(found)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_it_is_what_features_and_regression_say(rotation: Rotation) -> None:
    calibration, kv_caches, blocks = calibration_of(rotation), caches_of(), (7, 2, 11)
    got = predicted(calibration.part(0, HEADS), kv_caches, blocks)
    # Float32 sums in another order.
    torch.testing.assert_close(got, said(calibration, kv_caches, blocks), rtol=5e-5, atol=1e-9)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_what_was_learned_of_an_attention_predicts_it(rotation: Rotation) -> None:
    """The regression's torch and the kernel agree on which weight is whose."""
    truth, kv_caches = calibration_of(rotation), caches_of()
    every = tuple(range(1, BLOCKS))
    attention = said(truth, kv_caches, every)
    learned = []
    for cache, wanted in zip(kv_caches, attention, strict=True):
        sums = regression.Sums()
        sums.add(features(*tokens_of(cache, torch.tensor(every)), rotation), wanted)
        learned.append(sums.solve())
    part = calibration_of(rotation, torch.stack(learned)).part(0, HEADS)
    got = predicted(part, kv_caches, every)
    # The penalty, 10 on 2,528 tokens, takes 0.4 % of logarithms that deviate by up to 3.6.
    torch.testing.assert_close(got.log(), attention.log(), rtol=0.0, atol=0.02)
    assert attention.max() < 1 and attention.log().std() > 0.3


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_ranks_predict_together_what_one_does(rotation: Rotation, own: bool, copies: int) -> None:
    """Also where several have a copy of a head, which counts once."""
    calibration, kv_caches, blocks = calibration_of(rotation), caches_of(), (7, 2, 11)
    whole = predicted(calibration.part(0, HEADS), kv_caches, blocks)
    ranks = range(HEADS * copies)
    parts = [calibration.part(rank // copies, 1, is_first_copy=not rank % copies) for rank in ranks]
    heads = [slice(rank // copies, rank // copies + 1) for rank in ranks]
    caches = [[cache[:, mine].contiguous() for cache in kv_caches] for mine in heads]
    assert [part.of_all_heads for part in parts] == [not own] * len(ranks)
    # Each rank alone says what it adds, then gets what all do.
    added: list[Tensor] = []
    for part, mine in zip(parts, caches, strict=True):
        predicted(part, mine, blocks, lambda sums: added.append(sums.clone()))
    assert len(added) == (0 if own else len(ranks))

    def add_ranks(sums: Tensor) -> None:
        sums.copy_(sum(added))

    got = [
        predicted(part, mine, blocks, add_ranks) for part, mine in zip(parts, caches, strict=True)
    ]
    torch.testing.assert_close(torch.cat(got[::copies], 1), whole, rtol=5e-5, atol=1e-9)
    for rank in ranks:
        assert torch.equal(got[rank], got[rank - rank % copies]), "copies of a head agree"


def test_copies_of_the_only_head_each_predict_alone() -> None:
    (rotation, *_), kv_caches, blocks = ROTATIONS, caches_of(), (7, 2, 11)
    mine = [cache[:, :1].contiguous() for cache in kv_caches]
    whole = calibration_of(rotation)
    count = num_features(1, SIZE, SIZE, rotation)
    traits = replace(whole.traits, heads=1)
    alone = Calibration(whole.weights[:, :1, -count - 1 :].contiguous(), traits)
    first, second = (alone.part(0, 1, is_first_copy=first) for first in (True, False))
    assert not second.of_all_heads
    got = [predicted(part, mine, blocks) for part in (first, second)]
    assert torch.equal(*got) and got[0].std() > 0


def test_a_stage_predicts_its_own_layers() -> None:
    calibration, kv_caches, blocks = calibration_of(ROTATIONS[0]), caches_of(), (7, 2, 11)
    whole = predicted(calibration.part(0, HEADS), kv_caches, blocks)
    mine = slice(1, LAYERS)
    got = predicted(calibration.part(0, HEADS, mine), kv_caches[mine], blocks)
    assert torch.equal(got, whole[mine])
