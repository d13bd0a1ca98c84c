# SPDX-License-Identifier: Apache-2.0
"""The same engine compiled, in bf16, with other block sizes. In several processes: the live servers."""

from typing import Any

import pytest

from tests.engine.conftest import INSIDE, run_engine

pytestmark = pytest.mark.e2e

ASKED: list[dict[str, Any] | None] = [
    {"kv_budget": 0.2},
    None,
    {"kv_budget": 0.4, "kv_policy": "random"},
    {"kv_budget_tokens": 150, "kv_protect": 60},
]


def budgets_held(results: list[dict[str, Any]], block_size: int) -> None:
    for asked, result in zip(ASKED, results, strict=True):
        report = result["report"]
        if asked is None:
            assert report["tokens_evicted"] == 0
        else:
            assert report["budget_tokens"] <= report["tokens_held"]
            assert report["tokens_held"] < report["budget_tokens"] + block_size
            assert report["tokens_evicted"] > 0


@pytest.mark.parametrize(
    ("engine", "block_size", "environment"),
    [
        # vLLM's switch for tests: traced and run through the compiled path, without the minutes
        # that its C++ compilation takes.
        pytest.param(
            {"dtype": "bfloat16", "enforce_eager": False, "distributed_executor_backend": "uni"},
            32,
            INSIDE | {"VLLM_CPU_CI_ENV": "1", "TORCH_COMPILE_DISABLE": ""},
            id="bf16-compiled",
        ),
        pytest.param(
            {"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 192},
            16,
            {},
            id="bf16-block16",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.slow
def test_budgets_hold_in_every_mode(
    model_dir: str,
    text_tokens: list[int],
    engine: dict[str, Any],
    block_size: int,
    environment: dict[str, str],
) -> None:
    # Short, as CPUs without AVX-512 emulate bfloat16.
    prompts = [text_tokens[i * 500 : i * 500 + 300 + 40 * i] for i in range(4)]
    results = run_engine(
        model_dir,
        prompts,
        h2o={"kv_min_tokens": 64},
        asked=ASKED,
        engine=engine,
        environment=environment,
        max_tokens=40,
    )
    budgets_held(results, block_size)
