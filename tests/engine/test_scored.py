# SPDX-License-Identifier: Apache-2.0
"""Evictions inside a prompt: what follows ``kv_evict_from`` is computed as an answer would be."""

from typing import Any

import pytest

from tests.engine.conftest import Engine
from tests.engine.outputs import check_mix, kept_of, logprobs_of, report_of, tokens_of
from tests.engine.scheduling import Rig
from tests.served import SERVED

FIELDS = {"kv_budget": 0.25, "kv_protect": 20, "kv_delay": 0, "kv_heads": "equal"}
CONTEXT, REST, ANSWER = 300, 40, 20


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("policy", SERVED)
def test_law04_the_rest_of_a_prompt_is_scored_as_if_it_were_generated(
    clean: Engine, text_tokens: list[int], policy: str
) -> None:
    """An answer has the same log-probabilities if it is given as the end of another request's prompt."""
    context, asked = text_tokens[700:][:CONTEXT], {**FIELDS, "kv_policy": policy}
    (plain,) = clean.generate([context], asked, max_tokens=REST + ANSWER, logprobs=0)
    answer = tokens_of(plain)
    (scored,) = clean.generate(
        [context + answer[:REST]],
        {**asked, "kv_evict_from": CONTEXT},
        max_tokens=ANSWER,
        prompt_logprobs=0,
    )
    assert report_of(scored)["tokens_evicted"] == report_of(plain)["tokens_evicted"] > CONTEXT // 2
    assert tokens_of(scored) == answer[REST:]
    prompt: Any = scored.prompt_logprobs
    rest = zip(answer[:REST], prompt[CONTEXT:], logprobs_of(plain)[:REST], strict=True)
    for token, entries, expected in rest:
        assert entries[token].logprob == pytest.approx(expected[token], abs=1e-3)


@pytest.mark.e2e
@pytest.mark.slow
def test_law05_a_scored_prompt_does_not_depend_on_the_batch(
    clean: Engine, text_tokens: list[int]
) -> None:
    """Others cut its prompt into other chunks, and bring its doomed blocks into the prefix cache."""
    asked = [
        {**FIELDS, "kv_policy": policy, "kv_evict_from": at}
        for policy, at in (("auto", 300), ("h2o", 33), ("key", 499), ("window", 1))
    ]
    jobs = [(text_tokens[600:][:500], one) for one in asked]
    crowd = [(text_tokens[start : start + 150], None) for start in range(2000, 2600, 100)]
    outputs = check_mix(clean, jobs, [*crowd[:3], *jobs, *crowd[3:]], max_tokens=24)
    assert all(kept_of(output)["squeezed_at"] < 530 for output in outputs)


def test_law03_a_scored_prompt_may_be_larger_than_the_pool(model_dir: str) -> None:
    """3,000 tokens through a pool of 240; admission counts what the prompt holds at once."""
    rig = Rig(model_dir, 16, max_num_batched_tokens=64)
    asked = {"kv_budget_tokens": 96, "kv_delay": 0, "kv_evict_from": 160}
    for name in "ab":
        rig.add(name, list(range(10_000, 13_000)), asked, max_tokens=10)
    rig.run(limit=3000)
    assert rig.preemptions == 0
    report = rig.report("a")
    assert report["peak_blocks"] == 10
    assert report["tokens_held"] <= 96 + 16
