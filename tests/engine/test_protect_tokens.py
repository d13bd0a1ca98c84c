# SPDX-License-Identifier: Apache-2.0
"""Protected tokens, read from the cache: tokens, kept sets and scores are those of a cold run, in float32.

By causality: a key behind the pin gets attention from queries behind the pin only, and these are computed
either way, whichever other requests read the same prefix.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.conftest import BLOCK_SIZE, Engine, kept_of, report_of, tokens_of
from tests.engine.fidelity import Seen, run_to_the_end
from tests.served import policy_of

pytestmark = pytest.mark.e2e

PREFIX, LENGTH = 200, 330
PINNED = -(-PREFIX // BLOCK_SIZE) * BLOCK_SIZE
READERS: list[dict[str, Any] | None] = [
    None,
    {"kv_budget": 0.1, "kv_protect": 100},
    {"kv_budget": 0.1, "kv_protect": PREFIX, "kv_policy": "mean"},
    {"kv_budget": 0.1, "kv_policy": "h2o"},
    {"kv_budget": 0.1, "kv_policy": "window"},
]
"""Who shares the prefix: a stock request, some that evict behind it, and one that does not protect it."""


def assert_same(cold: Seen, warm: Seen, *, ranked: bool) -> None:
    """The same answer from the same tokens, in the same slots, with the same scores if ``ranked``."""
    assert warm.tokens == cold.tokens
    for step, other in zip(warm.logprobs, cold.logprobs, strict=True):
        for token, entry in step.items():
            assert entry.logprob == pytest.approx(other[token].logprob, abs=2e-3)
    close = {"rtol": 2e-3, "atol": 2e-3}
    for layer in range(len(cold.keys)):
        torch.testing.assert_close(warm.keys[layer], cold.keys[layer], **close)
        torch.testing.assert_close(warm.values[layer], cold.values[layer], **close)
        if ranked:
            # Those of pinned tokens are anybody's, and nobody looks at them.
            scores, expected = warm.scores[layer][:, PINNED:], cold.scores[layer][:, PINNED:]
            torch.testing.assert_close(scores, expected, **close)


@pytest.mark.parametrize(
    "policy",
    ["attention", *(pytest.param(one, marks=pytest.mark.slow) for one in ("key", "window"))],
)
def test_law05_cold_and_warm_runs_are_one(
    clean: Engine, text_tokens: list[int], policy: str
) -> None:
    asked = {"kv_budget": 0.3, "kv_policy": policy, "kv_protect": PREFIX}
    prompt = text_tokens[400 : 400 + LENGTH]
    cold = run_to_the_end(clean, prompt, asked)
    assert cold.report["tokens_cached"] == 0 and cold.report["tokens_evicted"] > 0
    assert cold.report["tokens_protected"] == PINNED
    # Its own pin, and with it what it may not read: all of its prompt, of a request without a budget.
    clean.generate([prompt], max_tokens=1)
    others = [(prompt[: 250 + 10 * i], budget) for i, budget in enumerate(READERS)]
    warm = run_to_the_end(clean, prompt, asked, others)
    # Without scores also what the first eviction frees, a block, or all that comes before it.
    more = 0 if policy_of(policy).needs_scores else BLOCK_SIZE
    if policy == "window":
        more = LENGTH // BLOCK_SIZE * BLOCK_SIZE - PINNED
    read = PINNED + more
    assert warm.report == cold.report | {"tokens_cached": read}
    # Ranks that rank anew leave nothing of meaning in the scores' memory between two evictions.
    scored = policy != "window" and not any(rank.anew for rank in policy_of(policy).ranks[:1])
    assert_same(cold, warm, ranked=scored)
    clean.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.slow
def test_law05_readers_of_one_prefix_do_not_see_each_other(
    clean: Engine, text_tokens: list[int]
) -> None:
    """All start at once, on an empty cache: the first computes the prefix while the others read it."""
    prompts = [text_tokens[400 : 400 + PREFIX] + text_tokens[a : a + 130] for a in (900, 1000)]
    asked = [
        {"kv_budget": 0.2, "kv_policy": "mean", "kv_protect": PREFIX},
        {"kv_budget": 0.2, "kv_policy": "value", "kv_protect": PREFIX + 30},
        {"kv_budget": 0.2},
        None,
    ]
    jobs = [(prompt, one) for prompt in prompts for one in asked]
    alone = []
    for prompt, one in jobs:
        alone += clean.generate([prompt], one, max_tokens=44)
        assert clean.llm.reset_prefix_cache()
    together = clean.generate([p for p, _ in jobs], [one for _, one in jobs], max_tokens=44)
    cached = []
    for one, reference, output in zip(jobs, alone, together, strict=True):
        assert tokens_of(output) == tokens_of(reference), one[1]
        report = report_of(output)
        assert kept_of(output) == kept_of(reference), one[1]
        assert (report["tokens_evicted"] > 0) is (one[1] is not None)
        assert report["tokens_cached"] == output.num_cached_tokens
        cached.append(report["tokens_cached"])
    assert sum(hit > 0 for hit in cached) >= 4
