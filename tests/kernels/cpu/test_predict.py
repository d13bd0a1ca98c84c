# SPDX-License-Identifier: Apache-2.0
"""What is predicted of tokens equals the reference, and a calibration: any type, shape and rotation."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration import features as room
from h2o_vllm.calibration.features import Rotation, features, num_features
from h2o_vllm.calibration.regression import predicted
from h2o_vllm.kernels.cpu import reference
from h2o_vllm.kernels.cpu.batch import key_value_views
from h2o_vllm.kernels.reference import attention_of
from h2o_vllm.policy.formulas import NEWER
from tests.kernels.cpu.test_evict import BLOCKS, HEADS, LAYERS, ids, make


def weights_of(count: int) -> Tensor:
    source = torch.Generator().manual_seed(1)
    weights = torch.randn(LAYERS, HEADS, count + 1, generator=source) * 0.05
    weights[..., -1] = -4.0
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "block_size", "rotary", "interleaved"),
    [(64, 32, 64, False), (80, 16, 32, False), (128, 128, 128, True), (64, 16, 20, True), (64, 32, 0, False)],
)  # fmt: skip
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("blocks", [(5,), (7, 2, 11, 3)], ids=["one", "some"])
def test_it_equals_the_reference_and_the_calibration(
    impl: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, block_size: int,
    rotary: int, interleaved: bool, own: bool, blocks: tuple[int, ...],
) -> None:  # fmt: skip
    monkeypatch.setattr(room, "MOST", 0 if own else 1 << 20)
    caches, where = make(dtype, size, block_size)[0], ids(*blocks)
    rotation = Rotation(rotary, interleaved)
    weights = weights_of(num_features(HEADS, size, size, rotation))
    # Nothing else is read.
    for cache in caches:
        cache[[block for block in range(BLOCKS) if block not in blocks]] = float("nan")
    got, want = (
        one.predict(caches, where, weights, rotary, interleaved=interleaved)
        for one in (impl, reference)
    )
    assert got.shape == (LAYERS, HEADS, len(blocks) * block_size) and got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=5e-5, atol=1e-9)
    for layer, cache in enumerate(caches):
        keys, values = (view[where.long()] for view in key_value_views(cache))
        keys, values = keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
        said = predicted(weights[layer], features(keys, values, rotation))
        torch.testing.assert_close(got[layer], said, rtol=5e-5, atol=1e-9)
    assert len(got.unique()) > got.numel() // 2


def test_sums_for_more_heads_than_the_caches_have(impl: ModuleType) -> None:
    """A rank of several: what its heads say of all heads' tokens is added up before it says anything."""
    caches, where = make(torch.bfloat16, 64, 32)[0], ids(7, 2)
    source = torch.Generator().manual_seed(3)
    weights = torch.randn(LAYERS, 2 * HEADS + 1, HEADS * 96 + 1, generator=source) * 0.05
    got, want = (
        one.predict(caches, where, weights, 64, interleaved=False, sums_alone=True)
        for one in (impl, reference)
    )
    assert got.shape == (LAYERS, 2 * HEADS + 1, 64) and (got > 0).any() and (got < 0).any()
    torch.testing.assert_close(got, want, rtol=5e-5, atol=1e-4)
    said = impl.predict(caches, where, weights, 64, interleaved=False)
    torch.testing.assert_close(said, attention_of(got), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_threads_share_the_blocks_and_change_no_bit(impl: ModuleType, threads: int) -> None:
    caches, _ = make(torch.bfloat16, 64, 32)
    weights = weights_of(HEADS * 96)
    together = impl.predict(caches, ids(1, 2, 3), weights, 64, interleaved=False)
    alone = [
        impl.predict([cache], ids(block), weights[layer : layer + 1], 64, interleaved=False)
        for layer, cache in enumerate(caches)
        for block in (1, 2, 3)
    ]
    joined = torch.cat(alone).view(LAYERS, 3, HEADS, 32).transpose(1, 2).flatten(2)
    torch.testing.assert_close(together, joined, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.parametrize("heads", [1, 5])
def test_a_model_of_many_layers(impl: ModuleType, threads: int, heads: int) -> None:
    """A later eviction: one block of it, each layer by weights of its own."""
    source = torch.Generator().manual_seed(2)
    caches = [torch.randn(4, heads, 16, 32, generator=source).bfloat16() for _ in range(37)]
    weights = torch.randn(37, heads, heads * 24 + 1, generator=source) * 0.1
    weights[..., -1] = -4.0
    got, want = (
        one.predict(caches, ids(2), weights, 16, interleaved=False) for one in (impl, reference)
    )
    torch.testing.assert_close(got, want, rtol=5e-5, atol=1e-9)


def test_equal_tokens_differ_by_less_than_tells_the_newest(impl: ModuleType) -> None:
    """Of equals the newest comes first: the policy's step per position is above what they differ by."""
    caches, _ = make(torch.bfloat16, 64, 32)
    for cache in caches:
        cache[4] = cache[9]
    got = impl.predict(caches, ids(4, 2, 9), weights_of(HEADS * 96), 64, interleaved=False)
    four, _, nine = got.split(32, dim=-1)
    torch.testing.assert_close(four, nine, rtol=NEWER / 2, atol=0.0)


def test_nothing_is_above_one_or_none_at_all(impl: ModuleType) -> None:
    caches, _ = make(torch.float32, 64, 32)
    weights = torch.zeros(LAYERS, HEADS, HEADS * 96 + 1)
    weights[:, 0, -1], weights[:, 1, -1] = 1e6, -1e6
    got = impl.predict(caches, ids(3), weights, 64, interleaved=False)
    assert (got[:, 0] == 1).all() and (got[:, 1] > 0).all() and (got[:, 1] < 1e-20).all()
