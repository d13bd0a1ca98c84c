# SPDX-License-Identifier: Apache-2.0
"""What is asked of keys and values where they lie equals torch, whatever their type, number and length."""

from itertools import product
from types import ModuleType

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation
from h2o_vllm.calibration.file import Part
from h2o_vllm.kernels.cpu.batch import key_value_views
from h2o_vllm.policy.fresh import Tokens
from tests.kernels.cpu.test_evict import BLOCKS, HEADS, LAYERS, make


def dense(caches: list[Tensor], blocks: Tensor) -> Tokens:
    keys, values = key_value_views(torch.cat([cache[blocks] for cache in caches]).float())
    shape = (len(caches), len(blocks))
    return Tokens(lambda: (keys.mT.unflatten(0, shape), values.unflatten(0, shape)))


def caches_of(dtype: torch.dtype, size: int, block_size: int, blocks: Tensor) -> list[Tensor]:
    """Of which nothing but ``blocks`` is a number."""
    caches, _ = make(dtype, size, block_size)
    for cache in caches:
        cache[[block for block in range(BLOCKS) if block not in blocks.tolist()]] = float("nan")
    return caches


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "block_size"), [(64, 32), (80, 16), (128, 128)])
@pytest.mark.parametrize("blocks", [[5], [7, 2, 11, 3]], ids=["one", "some"])
def test_sums_equal_torchs(
    impl: ModuleType,
    dtype: torch.dtype,
    size: int,
    block_size: int,
    blocks: list[int],
    threads: int,
) -> None:
    some = torch.tensor(blocks)
    caches = caches_of(dtype, size, block_size, some)
    for values, apart, (distances, over_tokens) in product(
        [False, True], [False, True], [(False, False), (True, False), (False, True)]
    ):
        shape = (
            len(some) if over_tokens or apart else 1,
            HEADS,
            block_size if over_tokens else size,
        )
        given = torch.randn(LAYERS, *shape, generator=torch.Generator().manual_seed(1))
        asked = {"values": values, "distances": distances, "over_tokens": over_tokens}
        got, want = (
            impl.reduce(caches, some, given, **asked),
            dense(caches, some).reduce(given, **asked),
        )
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("of", ["all heads", "own head", "more heads"])
@pytest.mark.parametrize(
    "rotation", [Rotation(64), Rotation(64, True), Rotation(32, True), Rotation(0)]
)
def test_features_are_weighed_as_a_calibration_does(
    impl: ModuleType, rotation: Rotation, of: str, threads: int
) -> None:
    """``more heads``: those of other workers."""
    some, size = torch.tensor([7, 2, 11]), 64
    caches = caches_of(torch.bfloat16, size, 32, some)
    sources = 1 if of == "own head" else HEADS
    count = sources * (2 * size - rotation.size // 2)
    results = HEADS + 3 if of == "more heads" else HEADS
    weights = torch.randn(LAYERS, results, count + 1, generator=torch.Generator().manual_seed(1))
    part = Part(weights, rotation, 0, of_all_heads=of == "more heads")
    by_head, constant = part.by_head(size)
    got = impl.weigh(caches, some, by_head, *rotation) + constant
    torch.testing.assert_close(got, part.sums(*dense(caches, some).both), rtol=2e-5, atol=2e-4)
