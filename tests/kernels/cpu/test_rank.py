# SPDX-License-Identifier: Apache-2.0
"""What policies learn of keys and values equals the reference, whatever their type, number and length."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels.cpu import reference
from h2o_vllm.kernels.lanes import own_pages
from tests.kernels.cpu.test_evict import BLOCKS, HEADS, LAYERS, ids, make

NAMES = ("key_similarity", "value_distances")


def pages(blocks: Tensor) -> Tensor:
    return own_pages(LAYERS, blocks.tolist(), HEADS)


def check(impl: ModuleType, caches: list[Tensor], blocks: Tensor) -> None:
    before = [cache.clone() for cache in caches]
    # Nothing else is read.
    others = [block for block in range(BLOCKS) if block not in blocks.tolist()]
    for cache in caches:
        cache[others] = float("nan")
    for name in NAMES:
        got, want = (getattr(one, name)(caches, pages(blocks)) for one in (impl, reference))
        assert got.shape == (LAYERS, HEADS, blocks.numel() * caches[0].shape[2])
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    ranked = blocks.long()
    assert all(torch.equal(a[ranked], b[ranked]) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "block_size"), [(64, 32), (80, 16), (128, 128)])
@pytest.mark.parametrize("blocks", [(5,), (7, 2, 11, 3)], ids=["one", "some"])
def test_they_equal_the_reference(
    impl: ModuleType, dtype: torch.dtype, size: int, block_size: int, blocks: tuple[int, ...]
) -> None:
    check(impl, make(dtype, size, block_size)[0], ids(*blocks))


def test_keys_of_any_length_and_none(impl: ModuleType) -> None:
    caches, _ = make(torch.float32, 64, 32)
    for cache in caches:
        cache.mul_(torch.logspace(-6, 6, BLOCKS)[:, None, None, None])
        cache[7] = 0
    for blocks in (ids(0, 4, 7, 11), ids(7)):
        got = impl.key_similarity(caches, pages(blocks))
        want = reference.key_similarity(caches, pages(blocks))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got[..., -32:].abs().max() <= 1.0001


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_threads_share_the_heads_and_change_no_bit(impl: ModuleType, threads: int) -> None:
    caches, _ = make(torch.bfloat16, 64, 32)
    given = pages(ids(1, 2, 3, 4, 5, 6))
    for name in NAMES:
        together = getattr(impl, name)(caches, given)
        alone = torch.cat([getattr(impl, name)([cache], given[:1]) for cache in caches])
        torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_equal_tokens_are_equally_far_and_alike(impl: ModuleType) -> None:
    """A tie is a tie: their order is then that of their places."""
    caches, _ = make(torch.bfloat16, 64, 32)
    for cache in caches:
        cache[4] = cache[9]
    for name in NAMES:
        four, _, nine = getattr(impl, name)(caches, pages(ids(4, 2, 9))).split(32, dim=-1)
        assert torch.equal(four, nine)
