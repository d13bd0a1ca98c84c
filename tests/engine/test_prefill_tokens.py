# SPDX-License-Identifier: Apache-2.0
"""Laws 5 and 6 for bounded prompts, in float32: neither chunks, batch, preemption nor cache have a say.

What each policy keeps of one: ``test_policies.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import BLOCK_SIZE, NUM_BLOCKS, Engine, kept_of, report_of, tokens_of

pytestmark = pytest.mark.e2e

BOUND = 192
LENGTH = 700
NEW = 30


def asked_by(policy: str, **more: Any) -> dict[str, Any]:
    return {"kv_budget": 0.2, "kv_policy": policy, "kv_prefill_tokens": BOUND, **more}


def assert_same(one: Any, other: Any) -> None:
    assert tokens_of(one) == tokens_of(other)
    for step, expected in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
        for token, entry in step.items():
            assert entry.logprob == pytest.approx(expected[token].logprob, abs=2e-3)
    assert kept_of(one) == kept_of(other)


@pytest.mark.parametrize("policy", ["attention", pytest.param("value", marks=pytest.mark.slow)])
def test_law05_alone_and_among_others_are_one(
    clean: Engine, text_tokens: list[int], policy: str
) -> None:
    """Others begin first and leave it odd shares of each step's tokens."""
    prompt, asked = text_tokens[200 : 200 + LENGTH], asked_by(policy, kv_protect=40)
    alone = clean.generate([prompt], asked, max_tokens=NEW, logprobs=0)[0]
    assert report_of(alone)["peak_blocks"] == (64 + BOUND) // BLOCK_SIZE
    assert clean.llm.reset_prefix_cache()
    others = [text_tokens[a : a + 333 + 41 * a // 400] for a in (900, 1300, 1700)]
    budgets: list[dict[str, Any] | None] = [None, {"kv_budget": 0.3}, asked_by("key")]
    crowd = clean.generate([*others, prompt], [*budgets, asked], max_tokens=NEW, logprobs=0)
    assert_same(crowd[-1], alone)


@pytest.mark.parametrize("policy", ["attention", pytest.param("random", marks=pytest.mark.slow)])
def test_law05_a_preempted_prompt_is_computed_anew_to_the_same_end(
    clean: Engine, text_tokens: list[int], policy: str
) -> None:
    from vllm import SamplingParams

    prompt, asked = text_tokens[200 : 200 + LENGTH], asked_by(policy)
    alone = clean.generate([prompt], asked, max_tokens=NEW, logprobs=0)[0]
    engine = clean.llm.llm_engine
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=NEW, logprobs=0, extra_args=asked
    )
    engine.add_request("again", {"prompt_token_ids": prompt}, params)
    outputs, steps = [], 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        steps += 1
        if steps in (5, 25):
            clean.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert steps > 25
    assert_same(outputs[0], alone)


def test_law06_prompt_of_twice_the_pool_is_served(clean: Engine, text_tokens: list[int]) -> None:
    """In a pool of a third of it, with the tokens it generates in one of its size."""
    prompt, asked = text_tokens[:1600], asked_by("h2o", kv_budget=0.1)
    roomy = clean.generate([prompt], asked, max_tokens=NEW, logprobs=0)[0]
    assert clean.llm.reset_prefix_cache()
    pool = clean.scheduler.blocks.block_pool
    taken = pool.get_new_blocks(NUM_BLOCKS - 1 - 16)
    try:
        tight = clean.generate([prompt], asked, max_tokens=NEW, logprobs=0)[0]
    finally:
        pool.free_blocks(taken)
    assert report_of(tight)["tokens_seen"] > 3 * 16 * BLOCK_SIZE
    assert_same(tight, roomy)
    clean.scheduler.blocks.check_integrity(idle=True)


def test_law01_prompt_within_its_bound_is_stock(clean: Engine, text_tokens: list[int]) -> None:
    prompt = text_tokens[:BOUND]
    stock = clean.generate([prompt], max_tokens=NEW, logprobs=0)[0]
    assert clean.llm.reset_prefix_cache()
    bounded = clean.generate([prompt], asked_by("h2o", kv_budget=1.0), max_tokens=NEW, logprobs=0)[
        0
    ]
    assert tokens_of(bounded) == tokens_of(stock)
    assert report_of(bounded)["squeezed_at"] is None
