# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 3, 5, 6 and 7 on a GPU engine with vLLM's defaults (compiled, CUDA graphs, asynchronous)."""

import random
from typing import Any

import pytest

from h2o_vllm.engine.cuda.variants import Variant
from tests.engine.conftest import Engine
from tests.engine.outputs import report_of, tokens_of
from tests.gpu.engine.conftest import BLOCK_SIZE, FLOOR, REHEARSED

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

BUDGETS: list[dict[str, Any] | None] = [
    {"kv_budget": 0.2},
    None,
    {"kv_budget": 0.5, "kv_recent": 0.25},
    {"kv_budget_tokens": 100},
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 0.3, "kv_policy": "random"},
    {"kv_budget": 0.3, "kv_policy": "mean"},
    {"kv_budget": 0.3, "kv_policy": "snapkv", "kv_protect": 4},
    {"kv_budget": 0.3, "kv_policy": "attention+end", "kv_protect": 40},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.3, "kv_policy": "value"},
    {"kv_budget": 0.3, "kv_policy": "value+key"},
    {"kv_budget": 0.3, "kv_policy": "end+key"},
    {"kv_budget": 0.3, "kv_policy": "value+end+key"},
    {"kv_budget": 0.3, "kv_protect": 60},
    {"kv_budget": 0.3, "kv_policy": "value+end+key", "kv_heads": "shared"},
    # Where kernels compute nothing, prompts must not be chunked.
    {"kv_budget": 0.3, "kv_policy": "h2o", "kv_heads": "shared"}
    | ({} if REHEARSED else {"kv_prefill_tokens": 256}),
    {"kv_budget": 0.3, "kv_policy": "mean", "kv_heads": "shared", "kv_protect": 60},
]


def prompts(count: int, seed: int = 0, low: int = 40, high: int = 900) -> list[list[int]]:
    rnd = random.Random(seed)
    return [[rnd.randrange(2, 512) for _ in range(rnd.randrange(low, high))] for _ in range(count)]


def test_all_variants_were_captured_with_all_layers(engine: Engine) -> None:
    state = engine.worker._state
    variants = state.step_variant.captured
    assert Variant.SCORED in variants and Variant.SHARED in variants
    for variant in variants[1:]:
        assert state.layers_captured(variant) == state.scores.shape[0]


def test_law2_every_block_comes_home(engine: Engine) -> None:
    batch = prompts(24)
    asked = [BUDGETS[i % len(BUDGETS)] for i in range(len(batch))]
    outputs = engine.generate(batch, asked, max_tokens=80)
    assert [len(tokens_of(output)) for output in outputs] == [80] * len(batch)
    engine.scheduler.blocks.check_integrity(idle=True)


def test_law3_live_blocks_stay_within_the_budget(engine: Engine) -> None:
    batch = prompts(8, seed=1, low=300)
    for output in engine.generate(batch, {"kv_budget": 0.25}, max_tokens=100):
        report = report_of(output)
        assert report["blocks_freed"] > 0
        # A budget, rounded up to blocks, and the block that is being filled.
        limit = -(-max(FLOOR, report["budget_tokens"]) // BLOCK_SIZE) + 1
        assert -(-report["tokens_held"] // BLOCK_SIZE) <= limit


def test_law5_what_a_request_keeps_does_not_depend_on_its_batch(engine: Engine) -> None:
    """Counts; in 16 bits batches of other sizes round differently. Tokens: ``test_float32.py``."""
    batch = prompts(12, seed=2)
    asked = [BUDGETS[i % len(BUDGETS)] for i in range(len(batch))]
    together = engine.generate(batch, asked, max_tokens=60)
    for i in (0, 2, 5, 11):
        (alone,) = engine.generate([batch[i]], asked[i], max_tokens=60)
        # The last one is protected: alone, it reads what it has left in the prefix cache.
        known = {"peak_blocks": 0, "tokens_cached": 0}
        assert report_of(alone) | known == report_of(together[i]) | known


def test_law6_shared_prompts_are_never_overwritten(engine: Engine) -> None:
    (prompt,) = prompts(1, seed=3, low=640, high=641)
    (before,) = engine.generate([prompt], max_tokens=40)
    engine.generate([prompt] * 4, [{"kv_budget": 0.2}, None] * 2, max_tokens=60)
    (after,) = engine.generate([prompt], max_tokens=40)
    assert tokens_of(after) == tokens_of(before)
    assert after.num_cached_tokens >= 640 - 2 * BLOCK_SIZE


def test_law7_nothing_computed_after_an_eviction_is_published(engine: Engine) -> None:
    (prompt,) = prompts(1, seed=4, low=500, high=501)
    (output,) = engine.generate([prompt], {"kv_budget": 0.2}, max_tokens=120)
    continued = prompt + tokens_of(output)
    (again,) = engine.generate([continued], max_tokens=4)
    assert again.num_cached_tokens <= len(prompt)


def test_law2_of_requests_that_rank_by_predictions(engine: Engine) -> None:
    """The rows of a calibrated server."""
    asked: list[Any] = [
        {"kv_policy": "auto", "kv_delay": 16},
        {"kv_policy": "predicted+key", "kv_heads": "equal"},
        {"kv_policy": "later", "kv_elastic": True},
    ] * 4
    asked = [{"kv_budget": 0.3} | one for one in asked]
    outputs = engine.generate(prompts(12, seed=6, low=300), asked, max_tokens=80)
    for one, output in zip(asked, outputs, strict=True):
        assert len(tokens_of(output)) == 80
        assert report_of(output)["blocks_freed"] or "kv_elastic" in one
    engine.scheduler.blocks.check_integrity(idle=True)


def test_law2_the_next_turn_reads_what_has_settled(engine: Engine) -> None:
    """Segments of 32 tokens, of which one block stays, from the 160th token on."""
    asked = {"kv_budget": 0.5, "kv_policy": "later", "kv_settle_tokens": 128, "kv_protect": 0}
    turns = prompts(8, seed=7, low=60, high=159)
    for turn in range(2):
        outputs = engine.generate(turns, asked, max_tokens=80)
        for output in outputs:
            report = report_of(output)
            assert bool(report["tokens_cached"]) == bool(turn)
            assert report["tokens_evicted"] == report["tokens_settled"] // 2
        assert any(report_of(output)["tokens_settled"] for output in outputs)
        turns = [one + tokens_of(output) for one, output in zip(turns, outputs, strict=True)]
    engine.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
def test_scores_are_probabilities(engine: Engine) -> None:
    """Each query hands out one unit per q head: the live scores of a request add up to its queries."""
    from vllm import SamplingParams

    (prompt,) = prompts(1, seed=5, low=200, high=201)
    params = SamplingParams(
        # Evicts, else it were not scored at all, but not before we have looked.
        temperature=0, ignore_eos=True, max_tokens=60, extra_args={"kv_budget_tokens": 208},
    )  # fmt: skip
    core, state = engine.llm.llm_engine, engine.worker._state
    core.add_request("sums", {"prompt_token_ids": prompt}, params)
    looked = 0
    while core.has_unfinished_requests():
        core.step()
        (request,) = engine.scheduler.requests.values() or (None,)
        if request is None or (seen := request.num_computed_tokens) > 212:
            continue
        (table,) = engine.scheduler.blocks.req_to_blocks.values()
        ids = [block.block_id for block in table]
        # [L, KH, slots]; behind the last token lie scores of whoever had the block before.
        live = state.scores[:, ids].transpose(1, 2).flatten(2)[:, :, :seen]
        # Per layer and kv head: one unit for each of the 4 q heads and each query that has run.
        sums = live.sum(2).flatten().tolist()
        assert sums == pytest.approx([4 * seen] * len(sums), rel=2e-3)
        looked += 1
    assert looked >= 10
