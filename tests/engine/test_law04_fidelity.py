# SPDX-License-Identifier: Apache-2.0
"""Law 4: the kept set equals an independent plain-torch H2O's, per layer and head; so do the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_vllm.kernels.reference import key_value_views
from tests.engine.conftest import BLOCK_SIZE, FLOOR, Engine
from tests.reference_h2o import Reference

STEPS = 48
"""Generated tokens: enough for an eviction after the first one."""


def live_slots(engine: Engine, request_id: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block id and offset of every live token of a running request."""
    state = engine.worker.model_runner.requests[request_id]
    blocks = [block for block in state.block_ids[0] if block != 0]
    flat = torch.tensor(blocks).repeat_interleave(BLOCK_SIZE)
    offsets = torch.arange(BLOCK_SIZE).repeat(len(blocks))
    return flat[:tokens], offsets[:tokens]


def run_to_the_end(engine: Engine, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
    """Generate step by step, and look into the worker before the request is gone."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=STEPS + 1, logprobs=5, extra_args=asked
    )
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("law4", {"prompt_token_ids": prompt}, params)
    seen: dict[str, Any] = {}
    while llm_engine.has_unfinished_requests():
        outputs = llm_engine.step()
        done = outputs[0].outputs[0] if outputs else None
        if done is not None and len(done.token_ids) == STEPS:
            (request,) = engine.scheduler.requests.values()
            held = engine.scheduler.blocks.account(request.request_id).report()["tokens_held"]
            state = engine.worker._state
            where = live_slots(engine, request.request_id, held)
            seen["keys"] = [
                key_value_views(kv)[0][where[0], :, :, where[1]].transpose(0, 1).clone()
                for kv in state.kv_caches
            ]
            seen["scores"] = [s[where[0], :, where[1]].T.clone() for s in state.scores]
            seen["tokens"] = list(done.token_ids)
            seen["logprobs"] = list(done.logprobs)
    return seen


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("fraction", "recent", "length"),
    [(0.2, 0.5, 400), (0.5, 0.25, 230), (0.1, 0.8, 1100), (0.3, 0.0, 90)],
    ids=["0.2", "0.5-heavy", "0.1-recent-several-chunks", "short-no-recent"],
)
def test_kept_tokens_scores_and_logits_equal_the_papers(
    engine: Engine, model_dir: str, text_tokens: list[int], fraction: float, recent: float,
    length: int,
) -> None:  # fmt: skip
    prompt = text_tokens[100 : 100 + length]
    ours = run_to_the_end(engine, prompt, {"kv_budget": fraction, "kv_recent": recent})
    reference = Reference(model_dir, fraction, recent, BLOCK_SIZE, FLOOR)
    tokens, logprobs = reference.generate(prompt, STEPS)
    assert ours["tokens"] == tokens
    for step, entries in enumerate(ours["logprobs"]):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(logprobs[step, token]), abs=2e-3)
    for layer, (keys, scores) in enumerate(zip(ours["keys"], ours["scores"], strict=True)):
        cache = reference.layers[layer]
        for head in range(keys.shape[0]):
            # Exact distances: by matrix product, equal keys would come out as far as 0.01 apart.
            distance = torch.cdist(
                keys[head], cache.keys[0, head], compute_mode="donot_use_mm_for_euclid_dist"
            )
            nearest, position = distance.min(dim=1)
            assert nearest.max() < 2e-3
            assert sorted(position.tolist()) == reference.kept(layer, head), (layer, head)
            torch.testing.assert_close(
                scores[head], cache.scores[0, head][position], rtol=2e-3, atol=2e-4
            )
