# SPDX-License-Identifier: Apache-2.0
"""Scores that are maxima: of decodes and prompts, of rows that share blocks, beside rows of sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from h2o_vllm.kernels.triton.maxima import raise_scores
from tests.kernels.triton.cases import (
    DTYPES,
    exact,
    exact_prompt,
    lend,
    low,
    make_batch,
    row_slots,
    shapes,
)
from tests.kernels.triton.decode_laws import check_decode, decode, workspace_for
from tests.kernels.triton.prompt_laws import add_scores, check_prompt, segments_of

ALL = shapes(  # (group, head size, block size, layout)
    (1, 64, 16, "NHD"), (3, 64, 32, "HND"), (4, 128, 16, "NHD"), (7, 80, 16, "NHD"), (4, 256, 128, "NHD"),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_decodes_raise_scores_as_the_reference_does(
    group: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    batch = make_batch(
        [1, 15, 0, 16, 17, 263, 200], group=group, size=size, block_size=block_size,
        dtype=DTYPES[dtype], layout=layout, strided=True,
    )  # fmt: skip
    check_decode(low(batch, 1, 2, 4, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_prompts_raise_scores_as_the_reference_does(
    group: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    batch = make_batch(
        [70, 2, 100, 33], [40, 2, 13, 33], group=group, size=size, block_size=block_size,
        dtype=DTYPES[dtype], layout=layout, strided=True,
    )  # fmt: skip
    check_prompt(low(batch, 0, 1, 3))


@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (0.0, True), (5.0, True)])
def test_caps_and_sinks_count(softcap: float, sinks: bool) -> None:
    for queries in ([1, 1, 1], [40, 33, 3]):
        batch = low(make_batch([140, 33, 300], queries, dtype=torch.bfloat16), 0, 2)
        batch.softcap = softcap
        batch.sinks = torch.linspace(-3.0, 7.0, batch.query.shape[1]) if sinks else None
        if queries[0] == 1:
            check_decode(batch, workspace_for(batch, 1))
        else:
            check_prompt(batch)


@pytest.mark.parametrize("query_dtype", [None, torch.bfloat16], ids=["q8", "q16"])
def test_8_bit_caches_are_read(query_dtype: torch.dtype | None) -> None:
    for check, queries in ((check_decode, [1, 1]), (check_prompt, [40, 9])):
        batch = make_batch(
            [40, 200], queries, group=4, size=80, dtype=torch.float8_e4m3fn, query_dtype=query_dtype,
            scales=(0.5, 1.5, 0.75) if query_dtype is None else (1.0, 1.5, 0.75),
        )  # fmt: skip
        check(low(batch, 0, 1))


@pytest.mark.parametrize("spare", [1, 4, 40])
def test_any_cut_gives_the_same(spare: int) -> None:
    batch = low(make_batch([700, 0, 3, 129, 64]), 0, 3)
    check_decode(batch, workspace_for(batch, spare))


def test_long_rows_are_cut_without_sums() -> None:
    batch = make_batch([700, 1026, 300], [700, 90, 300], group=1, dtype=torch.bfloat16)
    check_prompt(low(batch, 0, 1), last=[600, 90, 290])
    maxima = segments_of(low(batch, 0, 1), maxima=True)
    assert [(row, end - start) for row, start, end, *_ in maxima.segments.tolist()] == [
        (0, 256), (0, 256), (0, 188), (1, 88), (1, 2),
    ]  # fmt: skip
    assert {tuple(words[3:6]) for words in maxima.segments.tolist()} == {(-1, 0, 0)}


def test_readers_and_their_owners_share_blocks() -> None:
    """Both raise the same scores, in one launch; neither counts for the other."""
    batch = low(make_batch([90, 100, 70, 150], [1, 1, 1, 30]), 0, 1, 3)
    batch = lend(lend(batch, 0, 1, 5), 0, 3, 4)
    check_decode(batch, workspace_for(batch, tokens=2 * batch.poisoned.numel()))
    check_prompt(batch)
    prompts = low(make_batch([90, 100], [20, 80]), 0, 1)
    check_prompt(lend(prompts, 0, 1, 1))


def test_a_second_time_changes_nothing() -> None:
    """Maxima may be taken again, in any order, of any part.

    Not to the last bit: under the interpreter products are numpy's, which some CPUs round by their shape.
    """
    batch = low(make_batch([560, 60, 300], [560, 50, 60], group=2, dtype=torch.bfloat16), 0, 1, 2)
    lse, _ = exact_prompt(batch)
    once = batch.scores.clone()
    add_scores(batch, once, lse, segments_of(batch, maxima=True))
    again = batch.scores.clone()
    for last in ([560, 50, 60], [100, 7, 33], [1, 1, 1]):
        for row in (2, 0, 1):
            add_scores(batch, again, lse, segments_of(batch, [row], last, maxima=True))
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0.0, equal_nan=True)


def test_protected_tokens_stay() -> None:
    for queries in ([1, 1], [40, 65]):
        batch = low(make_batch([40, 65], queries), 0, 1)
        first = row_slots(batch, 0)
        scores = batch.scores.masked_fill(first, float("inf"))
        batch = dataclasses.replace(batch, scores=scores)
        lse, _ = exact_prompt(batch)
        decode(batch, batch.out(), scores)
        add_scores(batch, scores, lse, segments_of(batch, maxima=True))
        assert scores[first].isinf().all()


def test_what_everybody_has_raised_is_everybodys_maximum() -> None:
    """Who read a score before another raised it must not lower it again."""
    scores = torch.tensor([0.0, 0.5, 0.25, float("inf"), 0.125, 0.0])
    read = torch.tensor([0.0, 0.1, 0.25, float("inf"), 0.0, 0.0])
    new = torch.tensor([0.3, 0.3, 0.25, 0.9, 1e-30, 1e-40])
    _raise[(1,)](scores, read, new, N=6)
    expected = torch.tensor([0.3, 0.5, 0.25, float("inf"), 0.125, 1e-40])
    assert torch.equal(scores, expected)


@triton.jit
def _raise(scores, read, new, N: triton.language.constexpr):  # type: ignore[no-untyped-def]
    at = triton.language.arange(0, 8)
    live = at < N
    old = triton.language.load(read + at, mask=live)
    raise_scores(scores + at, old, triton.language.load(new + at, mask=live), live)


def test_a_flag_is_of_its_row() -> None:
    """Rows of maxima are planned as others are; padding behind the rows has any flag."""
    batch = make_batch([300, 0, 17, 700])
    sums, maxima = workspace_for(batch), workspace_for(batch)
    sums.plan(batch.query_start_loc, batch.seq_lens)
    maxima.plan(batch.query_start_loc, batch.seq_lens, low(batch, 1, 3).flags)
    signs = torch.where(maxima.pieces[:, 0] == 3, -1, 1)
    assert (signs < 0).sum() > 1
    pieces = sums.pieces.clone()
    pieces[:, 6] *= signs
    assert torch.equal(maxima.pieces, pieces)


def test_what_is_compared_differs() -> None:
    """The reference tells maxima from sums, where a group has several heads."""
    batch = make_batch([40, 65], [1, 1])
    _, sums = exact(batch)
    _, most = exact(low(batch, 0))
    assert not torch.equal(sums[row_slots(batch, 0)], most[row_slots(batch, 0)])
