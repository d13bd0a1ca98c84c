# SPDX-License-Identifier: Apache-2.0
"""Soft caps (Gemma 2) and attention sinks (gpt-oss): attention and scores equal the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from h2o_vllm.kernels.cpu import reference
from tests.kernels.cpu.cases import (
    Batch,
    assert_no_worse,
    attended_by_vllm,
    check_decode,
    check_prompt,
    make_batch,
)

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
def test_attention_equals_the_reference(
    impl: ModuleType, softcap: float, with_sinks: bool, dtype: torch.dtype, scored: int | None,
    threads: int,
) -> None:  # fmt: skip
    """Rows of one split and of several, with scores and without."""
    softmax = (softcap, with_sinks)
    decodes = case([5000, 33, 2100, 1, 700], None, *softmax, dtype=dtype, strided=True)
    check_decode(impl, decodes, scored)
    lengths, queries = [500, 33, 300, 700, 1], [500, 33, 100, 3, 1]
    check_prompt(impl, case(lengths, queries, *softmax, dtype=dtype, strided=True), scored)


@pytest.mark.parametrize("spread", [0.0, 30.0, 3000.0])
def test_a_cap_holds_logits_of_any_size(impl: ModuleType, spread: float) -> None:
    """Far beyond the cap, where tanh is 1, and at 0."""
    batch = case([700, 65], None, 30.0, False, spread=spread)
    check_decode(impl, batch)


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
