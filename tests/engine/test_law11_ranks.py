# SPDX-License-Identifier: Apache-2.0
"""Law 11: workers that share a model, by heads or by layers, free and keep what one worker does."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.common.tiny_model import make_tiny_model
from tests.calibration.made import make_calibration
from tests.engine.conftest import BLOCK_SIZE, INSIDE, run_engine

pytestmark = [
    pytest.mark.alone,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores"),
]

ASKED: list[dict[str, Any] | None] = [
    {"kv_budget": 0.2},
    None,
    {"kv_budget": 0.4, "kv_policy": "random"},
    {"kv_budget_tokens": 150, "kv_protect": 60},
    {"kv_budget": 0.2, "kv_prefill_tokens": 160},
    {"kv_budget": 0.3},
]
ELASTIC: list[dict[str, Any]] = [
    {"kv_budget": 0.2, "kv_elastic": True},
    {"kv_budget": 0.2, "kv_elastic": True, "kv_policy": "key"},
]
OF_LAYERS: list[dict[str, Any]] = [
    {"kv_budget": 0.3, "kv_policy": "predicted+attention", "kv_heads": "shared"},
    {"kv_budget": 0.3, "kv_policy": "random", "kv_protect": 0},
    {"kv_budget": 0.3, "kv_policy": "later", "kv_settle_tokens": 512},
]
"""What stages can, and ranks of tensor parallelism cannot, or have no need of."""
WITHOUT_SCORES: list[dict[str, Any] | None] = [
    None,
    *(
        {"kv_budget": 0.3, "kv_policy": policy, "kv_protect": 0}
        for policy in ("random", "predicted+key", "key", "window")
    ),
    {"kv_budget": 0.2, "kv_policy": "later", "kv_settle_tokens": 512},
    {"kv_budget": 0.2, "kv_policy": "key", "kv_elastic": True},
]
ALONE = {"distributed_executor_backend": "uni"}


def run(model: Path, asked: list[dict[str, Any] | None], **engine: Any) -> list[dict[str, Any]]:
    """The same prompts, on one worker in one process, or on two with a core each."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, 512, (300 + 90 * i,), generator=generator).tolist()
        for i in range(len(asked))
    ]
    cores = sorted(os.sched_getaffinity(0))[: 2 if engine else 1]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}
    return run_engine(
        str(model),
        prompts,
        h2o={
            "kv_min_tokens": 64,
            # Ranks cannot let heads share slots, which is the default of what predicts.
            "kv_heads": "equal",
            "kv_calibration": str(make_calibration(model, model / "calibration.h2o")),
        },
        asked=asked,
        engine={"skip_tokenizer_init": True, "num_gpu_blocks_override": 65, **(engine or ALONE)},
        environment=binding if engine else binding | INSIDE,
        max_tokens=60,
        detokenize=False,
    )


def check_alike(
    asked: list[dict[str, Any] | None], one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    for fields, alone, shared in zip(asked, one, two, strict=True):
        assert alone["tokens"] == shared["tokens"], fields
        report = alone["report"]
        assert report == shared["report"], fields
        if not (fields and fields.get("kv_elastic")):
            assert bool(report["tokens_evicted"]) is bool(fields), fields


def test_law11_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    model, asked = make_tiny_model(tmp_path), [*ASKED, *ELASTIC]
    one, two = run(model, asked), run(model, asked, tensor_parallel_size=2)
    check_alike(asked, one, two)
    # More than the pool holds: somebody had to yield.
    assert any(result["report"]["squeezed_at"] is not None for result in one[-len(ELASTIC) :])
    budget = one[0]["report"]
    assert budget["budget_tokens"] <= budget["tokens_held"] < budget["budget_tokens"] + BLOCK_SIZE


def test_law11_two_stages_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Of three layers. Steps of a pipeline begin before others have come back."""
    model, asked = make_tiny_model(tmp_path), [*ASKED, *OF_LAYERS, *ELASTIC]
    two = run(model, asked, pipeline_parallel_size=2)
    # Others need memory at other times: a squeezed request is the same by itself (law 5).
    squeezed = [result["report"]["squeezed_at"] for result in two[-len(ELASTIC) :]]
    assert any(squeezed)
    replayed = [
        {**{name: value for name, value in fields.items() if name != "kv_elastic"},
         "kv_evict_from": at} if at else fields
        for fields, at in zip(ELASTIC, squeezed, strict=True)
    ]  # fmt: skip
    one = run(model, [*asked[: -len(ELASTIC)], *replayed])
    count = len(asked) - len(ELASTIC)
    check_alike(asked[:count], one[:count], two[:count])
    assert [r["tokens"] for r in one[count:]] == [r["tokens"] for r in two[count:]]


@pytest.mark.long
def test_law11_two_ranks_with_copies_of_a_head_give_the_tokens_of_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, num_key_value_heads=1)
    one, two = run(model, WITHOUT_SCORES), run(model, WITHOUT_SCORES, tensor_parallel_size=2)
    check_alike(WITHOUT_SCORES, one, two)
