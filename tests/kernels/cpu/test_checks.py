# SPDX-License-Identifier: Apache-2.0
"""The checks refuse what would make a kernel read or write outside its tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu.checks import check_cache


def cache(
    blocks: int = 4, heads: int = 2, block_size: int = 32, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    return torch.zeros(blocks, heads, block_size, 2 * size, dtype=dtype)


def test_a_good_cache_passes() -> None:
    check_cache([cache(), cache()], torch.zeros(2, 4, 2, 32), num_heads=6)


@pytest.mark.parametrize(
    ("caches", "scores", "heads", "message"),
    [
        ([], torch.zeros(0, 4, 2, 32), 6, "at least one"),
        ([cache(dtype=torch.float64)], torch.zeros(1, 4, 2, 32), 6, "float64"),
        ([cache(block_size=24)], torch.zeros(1, 4, 2, 24), 6, "multiples of 16"),
        ([cache()], torch.zeros(1, 4, 2, 32), 5, "evenly"),
        ([cache(), cache(blocks=5)], torch.zeros(2, 4, 2, 32), 6, "one shape"),
        ([cache().transpose(0, 1)], torch.zeros(1, 2, 4, 32), 4, "contiguous"),
        ([cache()], torch.zeros(2, 4, 2, 32), 6, "scores must be"),
        ([cache()], torch.zeros(1, 4, 2, 32).half(), 6, "scores must be"),
    ],
)
def test_a_bad_cache_is_refused(
    caches: list[Tensor], scores: Tensor, heads: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cache(caches, scores, heads)
