# SPDX-License-Identifier: Apache-2.0
"""The same engine the way users run it: several processes, compiled, bf16, other block sizes, ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.common.tiny_model import make_tiny_model
from tests.calibration.made import make_calibration
from tests.engine.conftest import run_engine

pytestmark = pytest.mark.e2e

ASKED: list[dict[str, Any] | None] = [
    {"kv_budget": 0.2},
    None,
    {"kv_budget": 0.4, "kv_policy": "random"},
    {"kv_budget_tokens": 150, "kv_protect": 60},
]

TRACED: dict[str, Any] = {"kv_budget": 0.3, "kv_trace": True}

MORE: list[dict[str, Any]] = [
    {"kv_budget": 0.2, "kv_prefill_tokens": 160},
    {"kv_budget": 0.2, "kv_elastic": True},
    {"kv_budget": 0.2, "kv_elastic": True, "kv_policy": "key"},
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
            {"dtype": "bfloat16", "enforce_eager": False},
            32,
            {"VLLM_CPU_CI_ENV": "1", "TORCH_COMPILE_DISABLE": ""},
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


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose heads two ranks can share; the embedded model's nine cannot be halved."""
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_law11_two_ranks_give_the_tokens_of_one(random_llama: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    asked = [*ASKED, *MORE, TRACED]
    prompts = [
        torch.randint(0, 512, (300 + 90 * i,), generator=generator).tolist()
        for i in range(len(asked))
    ]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    calibration = str(make_calibration(random_llama, tmp_path / "calibration.h2o"))
    results = []
    for ranks, cores in ((1, f"{first}"), (2, f"{first}|{second}")):
        results.append(
            run_engine(
                str(random_llama),
                prompts,
                # Ranks cannot let heads share slots, which is the default of what predicts.
                h2o={
                    "kv_min_tokens": 64,
                    "kv_trace": True,
                    "kv_heads": "equal",
                    "kv_calibration": calibration,
                },
                asked=asked,
                engine={
                    "tensor_parallel_size": ranks,
                    "skip_tokenizer_init": True,
                    "num_gpu_blocks_override": 65,
                },
                environment={"VLLM_CPU_OMP_THREADS_BIND": cores},
                max_tokens=60,
                detokenize=False,
            )
        )
    one, two = results
    assert [r["tokens"] for r in one] == [r["tokens"] for r in two]
    assert [r["report"] for r in one] == [r["report"] for r in two]
    budgets_held(one[: len(ASKED)], 32)
    bounded, *elastic, traced = (result["report"] for result in one[len(ASKED) :])
    # Compared above, with the heads of both ranks in it.
    trace = traced["trace"]
    assert trace["evicted_at"] and len({str(head) for head in trace["lost"][0]}) > 1
    assert bounded["squeezed_at"] == bounded["prefill_tokens"] == 160
    # More than the pool holds: somebody had to yield.
    assert any(report["squeezed_at"] is not None for report in elastic)
