# SPDX-License-Identifier: Apache-2.0
"""What is compiled before the first request: the forms that serving will call, without a trace of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from h2o_vllm.engine.cuda import warmup
from h2o_vllm.engine.cuda.warmup import check_launches, warm_up
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.kernels.triton import warmup as kernel_warmup
from tests.engine.cuda.fake_gpu import fake_gpu
from tests.engine.cuda.fake_kernels import FP8
from tests.engine.cuda.fake_model import HEADS, SCALES, SIZE


@pytest.mark.parametrize("base", ["flash", "triton"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_warming_up_leaves_no_trace(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, base: str, kv_dtype: str
) -> None:
    seen = []
    stock = kernel_warmup.attend_prompts

    def attend_prompts(batch: kernels.LayerBatch, *args: Any) -> None:
        scales = (batch.query_scale, batch.key_scale)
        seen.append((batch.query.dtype, batch.query.shape, [one is not None for one in scales]))
        stock(batch, *args)

    with fake_gpu(model_dir, 20, base, kv_dtype) as (_, gpu):
        monkeypatch.setattr(kernel_warmup, "attend_prompts", attend_prompts)
        scales = {name: torch.tensor(scale) for name, scale in SCALES.items()}
        layer = SimpleNamespace(impl=gpu.impls[0], kv_cache=gpu.kv[0], **scales)
        before = [cache.view(torch.uint8).clone() for cache in gpu.kv]
        warm_up(gpu.state, layer, torch.float32)
        for cache, old in zip(gpu.kv, before, strict=True):
            assert torch.equal(cache.view(torch.uint8), old)
        assert not gpu.state.scores.any()
    fp8 = kv_dtype == "fp8"
    assert seen == 2 * [(FP8 if fp8 else torch.float32, (2, HEADS, SIZE), [fp8, fp8])]


def test_our_launch_is_compared_with_tritons_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[bool] = []
    monkeypatch.setattr(warmup, "leave_to_triton", lambda: left.append(True))
    check_launches("cpu")
    assert not left
    reset, launched = kernels.reset_scores, []

    def second_does_nothing(scores: torch.Tensor, slots: torch.Tensor) -> None:
        launched.append(scores)
        if len(launched) == 1:
            reset(scores, slots)

    monkeypatch.setattr(kernels, "reset_scores", second_does_nothing)
    check_launches("cpu")
    assert left == [True]

    def faults(*_: torch.Tensor) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(kernels, "reset_scores", faults)
    with pytest.raises(ConfigError, match=r"illegal memory access.*H2O_TRITON_LAUNCHES=1"):
        check_launches("cpu")
