# SPDX-License-Identifier: Apache-2.0
"""What is predicted of fresh tokens, whatever heads a rank has and whatever a regression knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation
from h2o_vllm.calibration.file import Calibration
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.kernels.triton import KVLayers, Prediction, Rescores, rescore, rescores
from tests.kernels.triton.cases import halves
from tests.kernels.triton.evict_laws import make_layers
from tests.kernels.triton.rescore_laws import by_formulas, calibration_of, check_rescore, early_of
from tests.kernels.triton.test_rescore import BLOCKS, evictions_of

LAYERS, HEADS = 2, 4


@pytest.mark.parametrize(
    ("size", "rotation"),
    [(64, Rotation(0)), (64, Rotation(20, interleaved=True)), (80, Rotation(80))],
    ids=str,
)
@pytest.mark.parametrize("own", [False, True])
def test_any_rotation_of_all_heads_or_of_its_own(size: int, rotation: Rotation, own: bool) -> None:
    caches, scores = make_layers(torch.bfloat16, size, 16, "NHD", LAYERS, BLOCKS, HEADS)
    calibration = calibration_of(LAYERS, HEADS, size, own=own, rotation=rotation)
    check_rescore(caches, scores, evictions_of(["predicted"] * 2), part=calibration.part(0, HEADS))


@pytest.mark.parametrize(
    ("policy", "own", "copies"),
    [
        ("predicted", False, 1),
        ("predicted", False, 2),
        ("predicted", True, 2),
        ("predicted+value+key", False, 1),
        ("predicted+value+key", True, 1),
    ],
)
def test_ranks_predict_together_what_one_does(policy: str, own: bool, copies: int) -> None:
    """Also where several have copies of the same heads, which count once."""
    caches, scores = make_layers(torch.float32, 64, 16, "NHD", LAYERS, BLOCKS, HEADS)
    calibration, early = calibration_of(LAYERS, HEADS, 64, own=own), early_of(scores)
    evictions = evictions_of([policy] * 2)
    want = by_formulas(caches, scores, early, evictions, calibration.part(0, HEADS))
    packed = Rescores.pack([rescore_of(one) for one in evictions], "cpu")
    # Each rank alone says what it would add, then gets what all do.
    ranks = [(held, copy == 0) for held in range(2) for copy in range(copies)]
    added: list[list[Tensor]] = [[] for _ in ranks]
    for rank, mine in zip(ranks, added, strict=True):
        _of_rank(*rank, calibration, caches, scores, early, packed, mine.append)
    assert bool(added[0]) == (not own)
    for held, first in ranks:
        everything = iter([sum(parts) for parts in zip(*added, strict=True)])

        def add_up(mine: Tensor, given: Callable[[], Tensor] = everything.__next__) -> None:
            mine.copy_(given())

        got = _of_rank(held, first, calibration, caches, scores, early, packed, add_up)
        torch.testing.assert_close(
            got, want[:, :, 2 * held : 2 * held + 2], rtol=1e-4, atol=1e-6, equal_nan=True
        )


def _of_rank(
    held: int,
    first: bool,
    calibration: Calibration,
    caches: list[Tensor],
    scores: Tensor,
    early: Tensor,
    packed: Rescores,
    add_ranks: Callable[[Tensor], object],
) -> Tensor:
    """Scores of a rank with two heads; ``add_ranks`` sees copies of what it would add."""
    mine = slice(2 * held, 2 * held + 2)
    keys, values = (
        [halves(cache)[which][:, :, mine].contiguous() for cache in caches] for which in (0, 1)
    )
    layers = KVLayers(keys, values, 1 << 20)
    got = scores[:, :, mine].clone()

    def add(sums: Tensor) -> None:
        if isinstance(add_ranks, type([].append)):
            add_ranks(sums.clone())
        else:
            add_ranks(sums)

    part = calibration.part(2 * held, 2, is_first_copy=first)
    prediction = Prediction.of(part, 2, 64, "cpu", add_ranks=add)
    rescore(layers, got, early[:, :, mine].contiguous(), packed, prediction=prediction)
    return got


def test_stored_numbers_are_scaled() -> None:
    """A cache of 8 bits, or of numbers that stand for others."""
    caches, scores = make_layers(torch.float32, 64, 16, "NHD", LAYERS, BLOCKS, HEADS)
    part = calibration_of(LAYERS, HEADS, 64).part(0, HEADS)
    evictions, early = evictions_of(["predicted"]), early_of(scores)
    scales = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    stored = [
        torch.cat([half / scale[layer] for half, scale in zip(halves(cache), scales, strict=True)], -1)
        for layer, cache in enumerate(caches)
    ]  # fmt: skip
    want = by_formulas(caches, scores, early, evictions, part)
    keys, values = zip(*(one.split(64, -1) for one in stored), strict=True)
    got = scores.clone()
    packed = Rescores.pack([rescore_of(one) for one in evictions], "cpu")
    prediction = Prediction.of(part, HEADS, 64, "cpu", scales)
    rescore(KVLayers(keys, values, 1 << 20), got, early, packed, prediction=prediction)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_small_scratch_takes_more_launches() -> None:
    caches, scores = make_layers(torch.bfloat16, 64, 16, "NHD", LAYERS, BLOCKS, HEADS)
    evictions = evictions_of(["predicted+key", "predicted", "predicted+end"])
    fresh = 9 * 16
    one_layer = 4 * (HEADS * (rescores.lists_of(2) * fresh + 1) + HEADS * fresh + 4)
    check_rescore(caches, scores.clone(), evictions, scratch_bytes=one_layer)
    with pytest.raises(ValueError, match="do not fit"):
        check_rescore(caches, scores, evictions, scratch_bytes=one_layer - 8)
    most = rescores.scratch_bytes(HEADS, fresh, HEADS)
    check_rescore(caches, scores, evictions, scratch_bytes=most)


def test_without_a_calibration_nobody_ranks_by_it() -> None:
    caches, scores = make_layers(blocks=BLOCKS)
    layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True), 1 << 20)
    packed = Rescores.pack([rescore_of(one) for one in evictions_of(["predicted"])], "cpu")
    before = scores.clone()
    with pytest.raises(AssertionError):
        rescore(layers, scores, scores, packed)
    assert torch.equal(scores, before)
