# SPDX-License-Identifier: Apache-2.0
"""Scores that keep the largest probability in place of the sum: equal to the reference, in any order."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from h2o_vllm.kernels.cpu import reference
from tests.kernels.cpu.cases import check, make_batch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
SHAPES = [(1, 64, 16), (3, 64, 32), (7, 96, 32), (8, 128, 128)]  # (group, head size, block size)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize(("scored", "most"), [(None, 5), (3, 3), (3, 2), (2, 1)])
def test_decode_equals_the_reference(
    impl: ModuleType, threads: int, dtype: torch.dtype, scored: int | None, most: int
) -> None:
    """Rows of several splits and of one; behind those with maxima come sums, and attention alone."""
    batch = make_batch([5000, 33, 2100, 1, 700], dtype=dtype, strided=True)
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.rows, batch.rows, batch.scale, out, scored)
    impl.attend_decode(batch.paged(scores), *arguments, most=most)
    check(batch, out, scores, scored, most)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize(("scored", "most"), [(None, 5), (3, 2), (2, 1)])
def test_prompts_equal_the_reference(
    impl: ModuleType, threads: int, dtype: torch.dtype, scored: int | None, most: int
) -> None:
    batch = make_batch([500, 700, 1100, 257, 31], [400, 260, 300, 2, 31], dtype=dtype, strided=True)
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    impl.attend_prompt(batch.paged(scores), *arguments, out, scored, most=most)
    check(batch, out, scores, scored, most)
    scores = batch.scores.clone()
    impl.score_prompt(batch.paged(scores), *arguments, most=most)
    check(batch, None, scores, None, most)


@pytest.mark.parametrize(("group", "size", "block_size"), SHAPES)
def test_odd_shapes_equal_the_reference(
    impl: ModuleType, group: int, size: int, block_size: int
) -> None:
    shape = {"group": group, "size": size, "block_size": block_size}
    batch = make_batch([70, 129, 300], [70, 1, 55], **shape)
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.query_start_loc, batch.rows, batch.scale, out)
    impl.attend_prompt(batch.paged(scores), *arguments, most=3)
    check(batch, out, scores, None, 3)


def test_the_same_queries_again_change_nothing(impl: ModuleType) -> None:
    batch = make_batch([300, 70], [40, 70])
    scores = batch.scores.clone()
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    impl.score_prompt(batch.paged(scores), *arguments, most=2)
    once = scores.clone()
    impl.score_prompt(batch.paged(scores), *arguments, most=2)
    assert torch.equal(batch.used_scores(scores), batch.used_scores(once))


@pytest.mark.parametrize("threads", [1, 5], indirect=True)
def test_rows_that_share_blocks_lose_nothing(impl: ModuleType, threads: int) -> None:
    """As a prompt and those who repeat it do, at once, from several threads."""
    batch = make_batch([640] * 6, [1, 200, 300, 1, 150, 2], kv_heads=1, group=4)
    batch.block_table[1:] = batch.block_table[0]
    owned = batch.block_table[0, :20].long()
    exact = torch.zeros_like(batch.scores)
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    reference.score_prompt(batch.paged(exact), *arguments, most=6)
    for _ in range(20 if threads > 1 else 1):
        scores = torch.zeros_like(batch.scores)
        impl.score_prompt(batch.paged(scores), *arguments, most=6)
        torch.testing.assert_close(scores[owned], exact[owned], rtol=1e-4, atol=1e-6)


def test_a_protected_token_stays_first(impl: ModuleType) -> None:
    batch = make_batch([40])
    scores = batch.scores.clone()
    first = batch.block_table[0, 0].item()
    scores[first, :, 3] = float("inf")
    impl.attend_decode(
        batch.paged(scores), batch.rows, batch.rows, batch.scale, batch.out(), most=1
    )
    assert (scores[first, :, 3] == float("inf")).all()
