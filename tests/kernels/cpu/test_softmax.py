# SPDX-License-Identifier: Apache-2.0
"""Soft caps (Gemma 2) and attention sinks (gpt-oss): attention and scores equal the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from h2o_vllm.kernels.cpu import reference
from tests.kernels.cpu.cases import Batch, assert_no_worse, attended_by_vllm, check, make_batch

SOFTMAX = {"cap": (2.0, False), "sinks": (0.0, True), "both": (5.0, True)}
KINDS = pytest.mark.parametrize(("softcap", "with_sinks"), SOFTMAX.values(), ids=SOFTMAX.keys())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def case(
    lengths: list[int], queries: list[int] | None, softcap: float, with_sinks: bool, **shape: object
) -> Batch:
    """Sinks as strong as some keys, as strong as hundreds, and next to nothing."""
    batch = make_batch(lengths, queries, **shape)  # type: ignore[arg-type]
    heads = batch.query.shape[1]
    batch.softcap = softcap
    if with_sinks:
        batch.sinks = torch.linspace(-3.0, 7.0, heads)
    return batch


@DTYPES
@KINDS
@pytest.mark.parametrize("scored", [None, 2])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_decode_equals_the_reference(
    impl: ModuleType, softcap: float, with_sinks: bool, dtype: torch.dtype, scored: int | None,
    threads: int,
) -> None:  # fmt: skip
    """Rows of one split and of several, with scores and without."""
    batch = case([5000, 33, 2100, 1, 700], None, softcap, with_sinks, dtype=dtype, strided=True)
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.rows, batch.rows, batch.scale, out, scored)
    impl.attend_decode(batch.paged(scores), *arguments, **batch.softmax)
    check(batch, out, scores, scored)


@DTYPES
@KINDS
@pytest.mark.parametrize("scored", [None, 2])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_prompts_equal_the_reference(
    impl: ModuleType, softcap: float, with_sinks: bool, dtype: torch.dtype, scored: int | None,
    threads: int,
) -> None:  # fmt: skip
    lengths, queries = [500, 33, 300, 700, 1], [500, 33, 100, 3, 1]
    batch = case(lengths, queries, softcap, with_sinks, dtype=dtype, strided=True)
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    impl.attend_prompt(batch.paged(scores), *arguments, out, scored, **batch.softmax)
    check(batch, out, scores, scored)
    scores = batch.scores.clone()
    impl.score_prompt(batch.paged(scores), *arguments, **batch.softmax)
    check(batch, None, scores)


@KINDS
@pytest.mark.parametrize(("group", "size", "block_size"), [(1, 64, 16), (7, 96, 32), (8, 128, 128)])
def test_odd_shapes_equal_the_reference(
    impl: ModuleType, softcap: float, with_sinks: bool, group: int, size: int, block_size: int
) -> None:
    shape = {"group": group, "size": size, "block_size": block_size}
    batch = case([70, 129, 300], [70, 1, 55], softcap, with_sinks, **shape)
    for scored in (None, 0):
        out, scores = batch.out(), batch.scores.clone()
        arguments = (batch.query_start_loc, batch.rows, batch.scale, out, scored)
        impl.attend_prompt(batch.paged(scores), *arguments, **batch.softmax)
        check(batch, out, scores, scored)


@pytest.mark.parametrize("spread", [0.0, 30.0, 3000.0])
def test_a_cap_holds_logits_of_any_size(impl: ModuleType, spread: float) -> None:
    """Far beyond the cap, where tanh is 1, and at 0."""
    batch = case([700, 65], None, 30.0, False, spread=spread)
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.rows, batch.rows, batch.scale, out)
    impl.attend_decode(batch.paged(scores), *arguments, **batch.softmax)
    check(batch, out, scores)


def test_what_a_sink_gets_is_in_nobodys_score(impl: ModuleType) -> None:
    """It takes the same share of every key's probability, and is everything or nothing at its ends."""
    batch = make_batch([777], group=1, kv_heads=1)
    no_scores = torch.zeros_like(batch.scores)

    def scores_with(sink: float | None) -> torch.Tensor:
        scores, out = no_scores.clone(), batch.out()
        sinks = None if sink is None else torch.full((batch.query.shape[1],), sink)
        paged = batch.paged(scores)
        impl.attend_decode(paged, batch.rows, batch.rows, batch.scale, out, sinks=sinks)
        assert not out.isnan().any()
        return batch.used_scores(scores).view(-1)

    alone = scores_with(None)
    torch.testing.assert_close(scores_with(float("-inf")), alone, rtol=1e-6, atol=0)
    assert not scores_with(1e4).any()
    share = 1 - scores_with(6.0) / alone
    assert 0.1 < float(share.min()) and float(share.max()) < 0.9
    torch.testing.assert_close(share, share[:1].expand_as(share), rtol=1e-4, atol=0)


@DTYPES
@KINDS
def test_output_is_as_good_as_stock(
    impl: ModuleType, softcap: float, with_sinks: bool, dtype: torch.dtype
) -> None:
    batch = case([300, 65, 700], [300, 1, 40], softcap, with_sinks, dtype=dtype)
    theirs, ours, exact = attended_by_vllm(batch), batch.out(), batch.out()
    paged = batch.paged(batch.scores.clone())
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    impl.attend_prompt(paged, *arguments, ours, **batch.softmax)
    reference.attend_prompt(paged, *arguments, exact, **batch.softmax)
    ulp = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_no_worse(ours, exact, theirs, ulp)
    assert_no_worse(theirs, exact, exact, 4 * ulp)
