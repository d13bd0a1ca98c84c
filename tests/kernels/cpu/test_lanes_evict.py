# SPDX-License-Identifier: Apache-2.0
"""Heads that share the slots of their heavy blocks: compaction and ranking equal their reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.lanes import own_lanes, share_lanes
from tests.kernels.cpu.test_evict import BLOCKS, compare, ids, make
from tests.kernels.triton.cases import random_owners


def wide(dtype: torch.dtype, size: int, block_size: int) -> tuple[list[Tensor], Tensor]:
    """As ``make``, with four heads of which some need more than others."""
    pairs = [make(dtype, size, block_size, seed) for seed in (1, 2)]
    caches = [torch.cat(two, dim=1) for two in zip(*(caches for caches, _ in pairs), strict=True)]
    scores = torch.cat([scores for _, scores in pairs], dim=2)
    return caches, scores * torch.tensor([0.2, 3.0, 0.7, 1.0])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "block_size"), [(64, 32), (80, 16), (128, 128)])
def test_compaction_equals_the_reference(
    impl: ModuleType, dtype: torch.dtype, size: int, block_size: int
) -> None:
    """A first eviction, and one after it, of which a block that was ranked and a fresh one are doomed."""
    caches, scores = wide(dtype, size, block_size)
    layers, _, heads, _ = scores.shape
    heavy, doomed = ids(7, 2, 9), ids(1, 11, 4)
    owners = own_lanes(layers, 6, heads)
    now = compare(impl, caches, scores, heavy, doomed, owners)
    impl.compact(caches, scores, heavy, doomed, owners)
    owners = torch.cat(
        [now[:, :2], own_lanes(layers, 1, heads), now[:, 2:], own_lanes(layers, 1, heads)], 1
    )
    compare(impl, caches, scores, ids(7, 2, 5), ids(9, 3), owners)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compaction_equals_the_reference_on_any_scores(data: st.DataObject) -> None:
    """Many ties, infinities, NaN and both zeros; any split of the blocks; lanes of anybody's."""
    impl = kernels.load()
    order = data.draw(st.permutations(range(1, BLOCKS)))
    heavy, doomed = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    caches, scores = wide(torch.bfloat16, 16, 16)
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    special = torch.tensor([0.0, -0.0, 1.0, 2.5, float("-inf"), float("nan"), 1e-40])
    picks = torch.randint(0, data.draw(st.integers(1, len(special))), scores.shape, generator=gen)
    scores = special[picks]
    owners = random_owners(len(caches), heavy + doomed, 4, gen)
    now = compare(
        impl, caches, scores, ids(*order[:heavy]), ids(*order[heavy : heavy + doomed]), owners
    )
    assert all(set(layer.flatten().tolist()) == {0, 1, 2, 3} for layer in now)


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
