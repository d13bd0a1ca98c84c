# SPDX-License-Identifier: Apache-2.0
"""Prompt scores equal the reference's column sums."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.cases import DTYPES, make_batch
from tests.kernels.triton.prompt_laws import check_prompt

SHAPES = [  # (group, head size, block size, layout)
    (1, 64, 16, "NHD"), (3, 64, 32, "HND"), (4, 128, 16, "NHD"), (7, 80, 16, "NHD"), (8, 96, 64, "HND"),
    (4, 256, 128, "NHD"),
]  # fmt: skip
IDS = ["G{}-D{}-BS{}-{}".format(*shape) for shape in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "block_size", "layout"), SHAPES, ids=IDS)
def test_prompt_scores_equal_the_reference(
    group: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    check_prompt(
        make_batch(
            [70, 2, 100], [40, 2, 13], group=group, size=size, block_size=block_size,
            dtype=DTYPES[dtype], layout=layout, strided=True,
        )
    )  # fmt: skip


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
def test_prompt_scores_of_mixed_rows(lengths: list[int], queries: list[int]) -> None:
    check_prompt(make_batch(lengths, queries, dtype=torch.bfloat16))


def test_only_the_listed_rows_are_scored() -> None:
    batch = make_batch([40, 70, 90], [40, 30, 2])
    check_prompt(batch, rows=[2, 0])


def test_a_transposed_log_sum_exp_will_do() -> None:
    batch = make_batch([40, 70], [40, 30])
    check_prompt(batch, transposed=True)


def test_a_peaked_softmax_is_summed() -> None:
    check_prompt(make_batch([150], [150], dtype=torch.float16, spread=30.0))


@pytest.mark.parametrize("group", [1, 3])
def test_only_the_last_queries_are_scored(group: int) -> None:
    batch = make_batch([150, 70, 90, 40], [150, 30, 90, 1], group=group)
    check_prompt(batch, last=[32, 1, 90, 1])
    check_prompt(batch, rows=[0, 1], last=[33, 30, 1, 1])
