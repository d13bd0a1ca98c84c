# SPDX-License-Identifier: Apache-2.0
"""Prompt scores equal the reference's column sums, and log-sum-exps its own."""

from typing import Any

import pytest
import torch

from tests.kernels.triton.cases import DTYPES, bits, make_batch, shapes
from tests.kernels.triton.prompt_laws import (
    add_scores,
    check_prompt,
    check_prompt_alone,
    segments_of,
)

ALL = shapes(
    (1, 2, 64, 16, "NHD"), (3, 2, 64, 32, "HND"), (4, 2, 128, 16, "NHD"), (7, 2, 80, 16, "NHD"),
    (32, 2, 96, 48, "HND"), (4, 2, 256, 528, "NHD"),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_prompts_equal_the_reference(shape: Any, dtype: str) -> None:
    check_prompt(make_batch([70, 2, 100], [40, 2, 13], dtype=DTYPES[dtype], strided=True, **shape))


@pytest.mark.parametrize("query_dtype", [None, torch.bfloat16], ids=["q8", "q16"])
def test_prompt_of_an_8_bit_cache_equals_the_reference(query_dtype: torch.dtype | None) -> None:
    check_prompt(
        make_batch(
            [40, 200], [40, 9], group=4, size=80, dtype=torch.float8_e4m3fn,
            query_dtype=query_dtype, scales=(0.5, 1.5, 0.75) if query_dtype is None else (1.0, 1.5, 0.75),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([2, 127, 128, 129], [2, 127, 128, 129]),
        ([300, 257, 64], [100, 2, 3]),
        ([40, 0, 90, 7, 33, 5], [1, 0, 30, 7, 0, 1]),
        ([400], [400]),
    ],
    ids=["whole", "chunked", "mixed", "long"],
)
def test_prompts_of_mixed_rows(lengths: list[int], queries: list[int]) -> None:
    check_prompt(make_batch(lengths, queries, dtype=torch.bfloat16))


def test_log_sum_exps_may_be_transposed() -> None:
    batch = make_batch([40, 70], [40, 30])
    check_prompt(batch, transposed=True)


def test_a_peaked_softmax_is_summed() -> None:
    check_prompt(make_batch([150], [150], dtype=torch.float16, spread=30.0))


def test_long_rows_are_cut_and_summed() -> None:
    prompts = check_prompt(
        make_batch([700, 1026, 300, 40], [700, 90, 40, 1], group=1, dtype=torch.bfloat16)
    )
    assert [(row, end - start) for row, start, end, *_ in prompts.segments.tolist()] == [
        (0, 256), (0, 256), (0, 188), (1, 88), (1, 2), (2, 40),
    ]  # fmt: skip


def test_a_row_that_lost_tokens_is_cut_by_its_logical_positions() -> None:
    batch = make_batch([300, 200], [100, 200], group=1)
    prompts = check_prompt(batch, holes=[512, 16 * 3])
    assert [(row, end - start) for row, start, end, *_ in prompts.segments.tolist()] == [
        (0, 56), (0, 44), (1, 200),
    ]  # fmt: skip
    prompts = check_prompt(batch, holes=[500, 20])
    assert prompts.segments[0, :3].tolist() == [0, 0, 68]


def test_a_prompt_does_not_depend_on_how_it_is_launched() -> None:
    check_prompt_alone(
        make_batch([560, 60, 300], [560, 50, 60], group=2, kv_heads=1, dtype=torch.bfloat16)
    )


def test_nothing_is_launched_for_no_rows() -> None:
    batch = make_batch([40, 9], [1, 1])
    prompts, scores = segments_of(batch), batch.scores.clone()
    assert prompts.launches == () and prompts.partial is None
    add_scores(batch, scores, torch.zeros(batch.query.shape[1], 2), prompts)
    assert torch.equal(bits(scores), bits(batch.scores))
