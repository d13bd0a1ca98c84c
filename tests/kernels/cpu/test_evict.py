# SPDX-License-Identifier: Apache-2.0
"""Compaction keeps exactly the tokens the reference keeps, in the same slots; reset, exactly its slots.

Also where heads share the slots of their heavy blocks.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import reference
from h2o_vllm.kernels.lanes import own_lanes, share_lanes
from tests.kernels.triton.cases import bits, random_owners

LAYERS, BLOCKS, HEADS = 3, 12, 4


def make(dtype: torch.dtype, size: int, block_size: int) -> tuple[list[Tensor], Tensor]:
    """Caches and scores; some heads need more than others."""
    gen = torch.Generator().manual_seed(0)
    caches = [
        torch.randn(BLOCKS, HEADS, block_size, 2 * size, generator=gen).to(dtype)
        for _ in range(LAYERS)
    ]
    scores = torch.rand(LAYERS, BLOCKS, HEADS, block_size, generator=gen)
    return caches, scores * torch.tensor([0.2, 3.0, 0.7, 1.0])[:, None]


def ids(*blocks: int) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int32)


def compare(
    impl: ModuleType, caches: list[Tensor], scores: Tensor, heavy: Tensor, doomed: Tensor, *owners: Tensor
) -> Any:  # fmt: skip
    """As the reference compacts, and only heavy blocks change. Returns the new owners, if heads share."""
    got, got_scores = [cache.clone() for cache in caches], scores.clone()
    want, want_scores = [cache.clone() for cache in caches], scores.clone()
    now = impl.compact(got, got_scores, heavy, doomed, *owners)
    expected = reference.compact(want, want_scores, heavy, doomed, *owners)
    assert not owners or torch.equal(now, expected)
    untouched = [block for block in range(BLOCKS) if block not in heavy.tolist()]
    assert torch.equal(bits(got_scores), bits(want_scores))
    assert torch.equal(bits(got_scores[:, untouched]), bits(scores[:, untouched]))
    for found, wanted, before in zip(got, want, caches, strict=True):
        assert torch.equal(bits(found), bits(wanted))
        assert torch.equal(bits(found[untouched]), bits(before[untouched]))
    return now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "block_size"), [(64, 32), (80, 16), (128, 128)])
def test_compaction_equals_the_reference(
    impl: ModuleType, dtype: torch.dtype, size: int, block_size: int
) -> None:
    """Of heads that share also one after it, of which a block that was ranked and a fresh one are doomed."""
    caches, scores = make(dtype, size, block_size)
    compare(impl, caches, scores, ids(7, 2, 9), ids(1, 11, 4, 3, 5))
    heavy, doomed = ids(7, 2, 9), ids(1, 11, 4)
    owners, fresh = own_lanes(LAYERS, 6, HEADS), own_lanes(LAYERS, 1, HEADS)
    now = compare(impl, caches, scores, heavy, doomed, owners)
    impl.compact(caches, scores, heavy, doomed, owners)
    owners = torch.cat([now[:, :2], fresh, now[:, 2:], fresh], 1)
    compare(impl, caches, scores, ids(7, 2, 5), ids(9, 3), owners)


@pytest.mark.parametrize(("heavy", "doomed"), [((), (1, 2)), ((3,), ()), ((), ())])
def test_compaction_of_nothing_does_nothing(
    impl: ModuleType, heavy: tuple[int, ...], doomed: tuple[int, ...]
) -> None:
    compare(impl, *make(torch.float32, 64, 32), ids(*heavy), ids(*doomed))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compaction_equals_the_reference_on_any_scores(data: st.DataObject) -> None:
    """Many ties, infinities, NaN and both zeros; any split of the blocks; lanes of anybody's."""
    impl = kernels.load()
    order = data.draw(st.permutations(range(1, BLOCKS)))
    heavy, doomed = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    caches, _ = make(torch.bfloat16, 16, 16)
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    special = torch.tensor([0.0, -0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan"), 1e-40])
    count = data.draw(st.integers(1, len(special)))
    scores = special[torch.randint(0, count, (LAYERS, BLOCKS, HEADS, 16), generator=gen)]
    blocks = ids(*order[:heavy]), ids(*order[heavy : heavy + doomed])
    compare(impl, caches, scores, *blocks)
    if heavy and doomed:
        owners = random_owners(LAYERS, heavy + doomed, HEADS, gen)
        now = compare(impl, caches, scores, *blocks, owners)
        assert all(set(layer.flatten().tolist()) == set(range(HEADS)) for layer in now)


@pytest.mark.parametrize(
    ("wanted", "lanes", "given"),
    [
        ([40, 24], 4, [3, 1]),  # 2.5 and 1.5 lanes: of equal remainders the lower head's
        ([39, 25], 4, [2, 2]),
        ([64, 0, 0], 4, [2, 1, 1]),  # one lane each
        ([56, 4, 4], 4, [2, 1, 1]),
        ([33, 16, 15], 4, [2, 1, 1]),
        ([20, 20, 40], 5, [1, 1, 3]),  # 1.25, 1.25, 2.5
    ],
)
def test_shares_are_rounded_to_lanes(wanted: list[int], lanes: int, given: list[int]) -> None:
    scores = [torch.tensor([1.0] * want + [0.0] * (96 - want)) for want in wanted]
    assert share_lanes(scores, lanes, 16) == given


def test_reset_equals_the_reference(impl: ModuleType) -> None:
    _, scores = make(torch.float32, 64, 32)
    slots = torch.tensor([5 * 32 + 31, 32, -1, 2 * 32 + 7])
    want = scores.clone()
    impl.reset_scores(scores, slots)
    reference.reset_scores(want, slots)
    assert torch.equal(scores, want)
    assert (scores[:, 5, :, 31] == 0).all()
