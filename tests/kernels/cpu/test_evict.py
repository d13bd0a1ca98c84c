# SPDX-License-Identifier: Apache-2.0
"""Compaction keeps exactly the tokens the reference keeps, in the same slots; reset, exactly its slots."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import reference
from tests.kernels.triton.cases import bits

LAYERS, BLOCKS, HEADS = 3, 12, 2


def make(
    dtype: torch.dtype, size: int, block_size: int, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    gen = torch.Generator().manual_seed(seed)
    caches = [
        torch.randn(BLOCKS, HEADS, block_size, 2 * size, generator=gen).to(dtype)
        for _ in range(LAYERS)
    ]
    return caches, torch.rand(LAYERS, BLOCKS, HEADS, block_size, generator=gen)


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
    caches, scores = make(dtype, size, block_size)
    compare(impl, caches, scores, ids(7, 2, 9), ids(1, 11, 4, 3, 5))


@pytest.mark.parametrize(("heavy", "doomed"), [((), (1, 2)), ((3,), ()), ((), ())])
def test_compaction_of_nothing_does_nothing(
    impl: ModuleType, heavy: tuple[int, ...], doomed: tuple[int, ...]
) -> None:
    compare(impl, *make(torch.float32, 64, 32), ids(*heavy), ids(*doomed))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compaction_equals_the_reference_on_any_scores(data: st.DataObject) -> None:
    """Many ties, infinities, NaN and both zeros, any split of the blocks."""
    impl = kernels.load()
    order = data.draw(st.permutations(range(1, BLOCKS)))
    heavy = data.draw(st.integers(0, 5))
    doomed = data.draw(st.integers(0, 6))
    caches, scores = make(torch.bfloat16, 16, 16)
    special = torch.tensor([0.0, -0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan"), 1e-40])
    picks = torch.randint(
        0, data.draw(st.integers(1, len(special))), scores.shape,
        generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))),
    )  # fmt: skip
    compare(impl, caches, special[picks], ids(*order[:heavy]), ids(*order[heavy : heavy + doomed]))


def test_reset_equals_the_reference(impl: ModuleType) -> None:
    _, scores = make(torch.float32, 64, 32)
    slots = torch.tensor([5 * 32 + 31, 32, -1, 2 * 32 + 7])
    want = scores.clone()
    impl.reset_scores(scores, slots)
    reference.reset_scores(want, slots)
    assert torch.equal(scores, want)
    assert (scores[:, 5, :, 31] == 0).all()
