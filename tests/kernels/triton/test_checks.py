# SPDX-License-Identifier: Apache-2.0
"""The checks refuse what would make a kernel read or write outside its tensors."""

import pytest
import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.triton import checks
from tests.kernels.triton.cases import halves

pytestmark = pytest.mark.table


def cache(
    blocks: int = 4, block_size: int = 16, heads: int = 2, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    return torch.zeros(blocks, heads, block_size, 2 * size, dtype=dtype)


@pytest.mark.parametrize(
    ("caches", "heads", "message"),
    [
        ([cache(), cache()], 6, None),
        ([cache(dtype=torch.float64)], 6, "float64"),
        ([cache(size=72)], 6, "head sizes 64, 80, 96, 128, 256, got 72"),
        ([cache(block_size=528)], 6, None),
        ([cache(block_size=24)], 6, "multiples of 16, up to 8192, got 24"),
        ([cache(block_size=8208)], 6, "got 8208"),
        ([cache()], 5, "got 5 query heads and 2 kv heads"),
        ([cache()], 66, "1 to 32 query heads"),
        ([cache(), cache(blocks=5)], 6, "one shape"),
        ([cache(), cache().mT.contiguous().mT], 6, "one layout"),
    ],
)
def test_layers_outside_the_tested_set_are_refused(
    caches: list[Tensor], heads: int, message: str | None
) -> None:
    keys, values = [halves(c)[0] for c in caches], [halves(c)[1] for c in caches]
    if message is None:
        checks.check_layers(keys, values, heads)
        return
    with pytest.raises(ConfigError, match=message):
        checks.check_layers(keys, values, heads)


def test_misaligned_keys_are_refused() -> None:
    flat = torch.zeros(4 * 2 * 16 * 128 + 1, dtype=torch.bfloat16)
    keys, values = halves(flat[1:].view(4, 2, 16, 128))
    with pytest.raises(ConfigError, match="aligned"):
        checks.check_layers([keys], [values], 6)
