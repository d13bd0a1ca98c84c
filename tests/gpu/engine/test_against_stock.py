# SPDX-License-Identifier: Apache-2.0
"""Laws 1 and 4 on a GPU, each engine in a process of its own: against stock vLLM, and against the paper."""

import random
from typing import Any

import pytest

from tests.engine.conftest import INSIDE, run_engine
from tests.gpu.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, MODES, REHEARSED
from tests.reference.policies import PolicyModel, load

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

H2O = {"kv_min_tokens": FLOOR}

BUDGETS = [(0.2, 0.5), (0.5, 0.25), (0.3, 0.0)]
"""Share of the tokens that is kept, and of that for the newest."""


def prompts(count: int = 8) -> list[list[int]]:
    rnd = random.Random(7)
    return [[rnd.randrange(2, 512) for _ in range(rnd.randrange(40, 700))] for _ in range(count)]


def run(
    model: str, mode: str, asked_prompts: list[list[int]] | None = None, **job: Any
) -> list[dict[str, Any]]:
    options = {**ENGINE, **MODES[mode], "skip_tokenizer_init": True, **job.pop("engine", {})}
    if "logprobs" in job:
        # vLLM compiles its kernels of logprobs when they are first called.
        options["jit_monitor_mode"] = "warn"
    # vLLM's Triton attention multiplies float32 as tf32 unless it is told otherwise.
    environment = {**INSIDE, "TRITON_F32_DEFAULT": "ieee"}
    if not REHEARSED:
        # Any wait for the device inside a step ends the engine.
        environment["VLLM_GPU_SYNC_CHECK"] = "error"
    return run_engine(
        model, asked_prompts or prompts(), engine=options, environment=environment, **job
    )


@pytest.mark.parametrize("mode", MODES)
def test_law1_requests_without_a_budget_are_served_by_stock_vllm(
    random_llama: str, mode: str
) -> None:
    stock = run(random_llama, mode, max_tokens=40)
    asked = [None, {"kv_budget": 1.0}] * 4
    ours = run(random_llama, mode, h2o=H2O, asked=asked, max_tokens=40)
    assert [one["tokens"] for one in ours] == [one["tokens"] for one in stock]


@pytest.mark.parametrize("mode", MODES)
def test_evictions_happen_in_every_mode(random_llama: str, mode: str) -> None:
    asked = [{"kv_budget": 0.2}, None] * 4
    ours = run(random_llama, mode, h2o=H2O, asked=asked, max_tokens=100)
    for one, wanted in zip(ours, asked, strict=True):
        assert len(one["tokens"]) == 100
        assert bool(one["report"]["blocks_freed"]) == (wanted is not None)


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
def test_law1_logprobs_in_float32(any_model: str) -> None:
    """vLLM's Triton backend: FlashAttention has no float32."""
    exact = {"dtype": "float32"}
    stock = run(any_model, "default", engine=exact, max_tokens=24, logprobs=3)
    ours = run(
        any_model, "default", h2o=H2O, engine=exact, max_tokens=24, logprobs=3,
        asked=[None, {"kv_budget": 1.0}] * 4,
    )  # fmt: skip
    for one, other in zip(ours, stock, strict=True):
        assert one["tokens"] == other["tokens"]
        for step, expected in zip(one["logprobs"], other["logprobs"], strict=True):
            assert step == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
@pytest.mark.parametrize("mode", ["default", "eager"])
def test_law4_logits_equal_the_papers(any_model: str, mode: str) -> None:
    """In float32; what is kept follows from the scores, and what is kept decides the logits."""
    texts = prompts()[:3]
    asked = [(budget, text) for budget in BUDGETS for text in texts]
    ours = run(
        any_model, mode, [text for _, text in asked], h2o=H2O, engine={"dtype": "float32"},
        asked=[{"kv_budget": share, "kv_recent": recent} for (share, recent), _ in asked],
        max_tokens=48, logprobs=3,
    )  # fmt: skip
    model = load(any_model)
    for one, (budget, text) in zip(ours, asked, strict=True):
        reference = PolicyModel(model, "attention", *budget, BLOCK_SIZE, FLOOR)
        tokens, logprobs = reference.generate(text, 48)
        case = f"budget {budget}, {len(text)} tokens"
        assert one["tokens"] == tokens, case
        for step, entries in enumerate(one["logprobs"]):
            for token, logprob in entries.items():
                expected = float(logprobs[step, int(token)])
                assert logprob == pytest.approx(expected, abs=2e-2), f"step {step} of {case}"
