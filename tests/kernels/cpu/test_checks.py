# SPDX-License-Identifier: Apache-2.0
"""The checks refuse what would make a kernel read or write outside its tensors."""

import pytest
import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu.batch import check_caches


def cache(
    blocks: int = 4, heads: int = 2, block_size: int = 32, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    return torch.zeros(blocks, heads, block_size, 2 * size, dtype=dtype)


def test_a_good_cache_passes() -> None:
    check_caches([cache(), cache()])


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([cache(dtype=torch.float64)], "float64"),
        ([cache(block_size=24)], "multiples of 16"),
        ([cache(), cache(blocks=5)], "one shape"),
        ([cache().transpose(0, 1)], "contiguous"),
    ],
)
def test_a_bad_cache_is_refused(caches: list[Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_caches(caches)
