# SPDX-License-Identifier: Apache-2.0
"""The log-sum-exp of prompt queries equals the reference's."""

from __future__ import annotations

import pytest
import torch

from h2o_vllm.kernels.triton import attend_prompts
from tests.kernels.triton.cases import DTYPES, Batch, exact_prompt, make_batch, shapes

ALL = shapes((1, 64, 16, "NHD"), (3, 64, 32, "HND"), (4, 128, 16, "NHD"), (7, 80, 16, "NHD"))


def check_lse(batch: Batch, rows: list[int], transposed: bool = False) -> None:
    """Listed rows' queries equal the reference; nobody else's are written."""
    want, _ = exact_prompt(batch)
    out = torch.full_like(want, float("nan"))
    if transposed:
        out = out.T.contiguous().T
    asked_rows = torch.tensor(rows, dtype=torch.int32, device=out.device)
    longest = max(count for _, count in batch.lengths)
    attend_prompts(batch.given(batch.scores), asked_rows, longest, out)
    starts = batch.query_start_loc.tolist()
    asked = torch.zeros(out.shape[1], dtype=torch.bool)
    for row in rows:
        asked[starts[row] : starts[row + 1]] = True
    assert out[:, ~asked].isnan().all()
    torch.testing.assert_close(out[:, asked], want[:, asked], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_lse_equals_the_reference(
    group: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    batch = make_batch(
        [70, 2, 140], [70, 2, 23], group=group, size=size, block_size=block_size,
        dtype=DTYPES[dtype], layout=layout, strided=True,
    )  # fmt: skip
    check_lse(batch, [0, 1, 2])


@pytest.mark.parametrize(
    ("lengths", "queries", "rows"),
    [
        ([2, 127, 128, 129], [2, 127, 128, 129], [0, 1, 2, 3]),
        ([300, 257, 64], [100, 2, 3], [2, 0]),
        ([40, 0, 90, 7, 33, 5], [1, 0, 30, 7, 0, 1], [2, 3]),
    ],
    ids=["whole", "chunked", "mixed"],
)
def test_lse_of_mixed_rows(lengths: list[int], queries: list[int], rows: list[int]) -> None:
    check_lse(make_batch(lengths, queries, dtype=torch.bfloat16), rows)


@pytest.mark.parametrize("query_dtype", [None, torch.bfloat16], ids=["fp8", "bf16-query"])
def test_lse_of_a_cache_in_8_bits(query_dtype: torch.dtype | None) -> None:
    batch = make_batch(
        [70, 2, 140], [70, 2, 23], dtype=torch.float8_e4m3fn, query_dtype=query_dtype,
        scales=(0.5, 1.5, 0.75) if query_dtype is None else (1.0, 1.5, 0.75),
    )  # fmt: skip
    check_lse(batch, [0, 1, 2])
