# SPDX-License-Identifier: Apache-2.0
"""Law 11 on two GPUs: each keeps its own heads' or layers' tokens; together they say what one GPU says."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.common.tiny_model import make_tiny_model
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
RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def run(
    model: str, mode: str, dtype: str, asked: list[dict[str, Any] | None], **workers: int
) -> list[dict[str, Any]]:
    rnd = random.Random(11)
    prompts = [[rnd.randrange(2, 512) for _ in range(300 + 60 * i)] for i in range(len(asked))]
    options = {**ENGINE, **MODES[mode], "dtype": dtype, "skip_tokenizer_init": True}
    return run_engine(
        model,
        prompts,
        h2o={"kv_min_tokens": FLOOR},
        asked=asked,
        engine={**options, **workers},
        max_tokens=60,
        detokenize=False,
    )


def asked_of(workers: dict[str, int]) -> list[dict[str, Any] | None]:
    """In a pipeline others need memory at other times: an elastic request may be squeezed elsewhere."""
    elastic = [asked for asked in ASKED if asked and "kv_elastic" in asked]
    return [asked for asked in ASKED if workers is RANKS or asked not in elastic]


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
@pytest.mark.parametrize("workers", [RANKS, STAGES], ids=["ranks", "stages"])
@pytest.mark.parametrize("mode", ["default", "eager"])
def test_law11_two_gpus_give_the_tokens_of_one(
    random_llama: str, mode: str, workers: dict[str, int]
) -> None:
    """In float32: in 16 bits the sum over ranks rounds differently from a sum within one."""
    asked = asked_of(workers)
    one, two = (run(random_llama, mode, "float32", asked, **some) for some in ({}, workers))
    assert [result["tokens"] for result in one] == [result["tokens"] for result in two]
    assert [result["report"] for result in one] == [result["report"] for result in two]


@pytest.mark.parametrize("workers", [RANKS, STAGES], ids=["ranks", "stages"])
def test_law11_two_gpus_free_the_same_blocks(random_llama: str, workers: dict[str, int]) -> None:
    """Captured graphs, 16 bits: counts alone decide, so that reports are those of one GPU."""
    asked = asked_of(workers)
    one, two = (run(random_llama, "default", "bfloat16", asked, **some) for some in ({}, workers))
    assert [result["report"] for result in one] == [result["report"] for result in two]
    assert all(
        result["report"]["blocks_freed"]
        for fields, result in zip(asked, two, strict=True)
        if fields and "kv_elastic" not in fields
    )


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
def test_law11_two_gpus_with_copies_of_a_head_give_the_tokens_of_one(tmp_path: Path) -> None:
    """A model with one KV head, and policies that collect no attention."""
    model = str(make_tiny_model(tmp_path, num_key_value_heads=1, head_dim=64))
    asked: list[dict[str, Any] | None] = [
        None,
        *({"kv_budget": 0.3, "kv_policy": policy} for policy in ("random", "key", "window")),
    ]
    one, two = (run(model, "default", "float32", asked, **some) for some in ({}, RANKS))
    assert [result["tokens"] for result in one] == [result["tokens"] for result in two]
    assert [result["report"] for result in one] == [result["report"] for result in two]
