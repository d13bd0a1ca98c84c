# SPDX-License-Identifier: Apache-2.0
"""Law 11 on two GPUs: each rank keeps its own heads' tokens, and together they say what one GPU says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.engine.conftest import run_engine
from tests.gpu.engine.conftest import ENGINE, FLOOR, MODES, REHEARSED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two CUDA devices, found {torch.cuda.device_count()}",
    ),
]

ASKED: list[dict[str, Any] | None] = [
    {"kv_budget": 0.2},
    None,
    {"kv_budget": 0.4, "kv_policy": "random"},
    {"kv_budget_tokens": 150, "kv_protect": 60},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.2, "kv_prefill_tokens": 160},
    {"kv_budget": 0.2, "kv_elastic": True},
]


def run(model: str, ranks: int, mode: str, dtype: str) -> list[dict[str, Any]]:
    rnd = random.Random(11)
    prompts = [[rnd.randrange(2, 512) for _ in range(300 + 60 * i)] for i in range(len(ASKED))]
    options = {**ENGINE, **MODES[mode], "dtype": dtype, "skip_tokenizer_init": True}
    return run_engine(
        model,
        prompts,
        h2o={"kv_min_tokens": FLOOR},
        asked=ASKED,
        engine={**options, "tensor_parallel_size": ranks},
        max_tokens=60,
        detokenize=False,
    )


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
@pytest.mark.parametrize("mode", ["default", "eager"])
def test_law11_two_gpus_give_the_tokens_of_one(random_llama: str, mode: str) -> None:
    """In float32: in 16 bits the sum over ranks rounds differently from a sum within one."""
    one, two = (run(random_llama, ranks, mode, "float32") for ranks in (1, 2))
    assert [result["tokens"] for result in one] == [result["tokens"] for result in two]
    assert [result["report"] for result in one] == [result["report"] for result in two]


def test_law11_two_gpus_free_the_same_blocks(random_llama: str) -> None:
    """Captured graphs, 16 bits: counts alone decide, so that reports are those of one GPU."""
    one, two = (run(random_llama, ranks, "default", "bfloat16") for ranks in (1, 2))
    assert [result["report"] for result in one] == [result["report"] for result in two]
    assert all(
        result["report"]["blocks_freed"]
        for asked, result in zip(ASKED, two, strict=True)
        if asked and "kv_elastic" not in asked
    )
