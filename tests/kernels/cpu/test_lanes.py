# SPDX-License-Identifier: Apache-2.0
"""Heads that share the slots of their heavy blocks: attention equals plain torch."""

import dataclasses
from types import ModuleType

import pytest
import torch

from h2o_vllm.kernels.cpu import reference
from h2o_vllm.kernels.cpu.batch import Lanes
from h2o_vllm.kernels.lanes import own_lanes
from tests.kernels.cpu.cases import Batch, attend, by_torch, check_attention, make_batch
from tests.kernels.cpu.test_attend import DTYPES
from tests.kernels.triton.cases import bits, random_owners

SHAPES = [(1, 64, 32), (3, 64, 16), (4, 80, 16), (7, 96, 32), (8, 128, 128)]
"""group, head size, block size"""
HEADS = 3


def lanes_of(batch: Batch, heavy: list[int], *, own: bool = False) -> Lanes:
    """The first ``heavy[row]`` blocks of each row are shared; 0: the row shares none."""
    gen = torch.Generator().manual_seed(5)
    heads, shared = batch.kv_cache.shape[1], [row for row, count in enumerate(heavy) if count]
    rows = torch.full((len(heavy),), -1, dtype=torch.int32)
    # Other slots than the rows' numbers, and pages behind the last one that nobody may follow.
    pages = torch.full((len(shared) + 1, heads, max(heavy) * heads), -(2**30), dtype=torch.int32)
    counts = torch.full((len(shared) + 1, heads), -(2**30), dtype=torch.int32)
    blocks = torch.full((len(shared) + 1,), -(2**30), dtype=torch.int32)
    for place, row in enumerate(reversed(shared)):
        count = heavy[row]
        owners = (own_lanes(1, count, heads) if own else random_owners(1, count, heads, gen))[0]
        every = batch.block_table[row, :count, None] * heads + torch.arange(
            heads, dtype=torch.int32
        )
        rows[row], blocks[place] = place, count
        for head in range(heads):
            mine = every[owners == head]
            pages[place, head, : len(mine)], counts[place, head] = mine, len(mine)
    return Lanes(rows, pages, counts, blocks)


def check_all(impl: ModuleType, batch: Batch, lanes: Lanes) -> None:
    """Scored and unscored."""
    for scored in (None, 0):
        check_attention(impl, batch, scored, lanes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "block_size"), SHAPES)
def test_attention_equals_plain_torch(
    impl: ModuleType, group: int, size: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = {"kv_heads": HEADS, "group": group, "size": size, "block_size": block_size}
    lengths = [n * block_size + more for n, more in ((1, 1), (5, 0), (4, 7), (9, 3), (2, 0))]
    batch = make_batch(lengths, dtype=dtype, **shape)
    check_all(impl, batch, lanes_of(batch, [1, 3, 0, 6, 2]))
    lengths = [5 * block_size + 70, 3 * block_size + 33, 2 * block_size + 2]
    batch = make_batch(lengths, [70, 20, 2], dtype=dtype, **shape)
    check_all(impl, batch, lanes_of(batch, [4, 0, 2]))


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_shared_by_threads_equal_plain_torch(
    impl: ModuleType, threads: int, dtype: torch.dtype
) -> None:
    """Heads of a row are split differently, as they hold different numbers of tokens."""
    batch = make_batch([2200, 900, 1800], kv_heads=HEADS, dtype=dtype)
    check_all(impl, batch, lanes_of(batch, [60, 0, 40]))
    batch = make_batch([700, 500], [300, 400], kv_heads=HEADS, dtype=dtype)
    check_all(impl, batch, lanes_of(batch, [10, 3]))


def test_soft_caps_and_sinks_are_those_of_each_head(impl: ModuleType) -> None:
    batch = make_batch([200, 90], [60, 1], kv_heads=HEADS, spread=20.0)
    batch.softcap, batch.sinks = 8.0, torch.linspace(-3, 9, HEADS * 3)
    check_all(impl, batch, lanes_of(batch, [4, 2]))


def test_the_reference_equals_plain_torch() -> None:
    batch = make_batch([200, 90, 70], [60, 1, 5], kv_heads=HEADS)
    lanes = lanes_of(batch, [4, 2, 0])
    exact = dataclasses.replace(batch, query=batch.query.double())
    for ours, theirs in zip(
        attend(reference, exact, lanes=lanes), by_torch(exact, lanes), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("queries", [[1, 1, 1], [40, 1, 200]], ids=["decode", "prompt"])
def test_lanes_that_are_everybodys_own_change_no_bit(
    impl: ModuleType, threads: int, queries: list[int]
) -> None:
    batch = make_batch([2500, 70, 600], queries, kv_heads=HEADS, dtype=torch.bfloat16)
    own = lanes_of(batch, [50, 2, 9], own=True)
    for ours, theirs in zip(attend(impl, batch), attend(impl, batch, lanes=own), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_row_does_not_depend_on_its_batch(impl: ModuleType, threads: int) -> None:
    batch = make_batch([2600, 33, 70, 1200, 64], kv_heads=HEADS, dtype=torch.bfloat16)
    lanes = lanes_of(batch, [60, 0, 2, 20, 1])
    together, scores = batch.out(), batch.scores.clone()
    paged = batch.paged(scores)._replace(lanes=lanes)
    impl.attend_decode(paged, batch.rows, batch.rows, batch.scale, together)
    alone, alone_scores = batch.out(), batch.scores.clone()
    for row in batch.rows.split(1):
        paged = batch.paged(alone_scores)._replace(lanes=lanes)
        impl.attend_decode(paged, row, row, batch.scale, alone)
    assert torch.equal(together, alone)
    assert torch.equal(batch.used_scores(scores), batch.used_scores(alone_scores))
