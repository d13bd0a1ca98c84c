# SPDX-License-Identifier: Apache-2.0
"""Law 5 of a request that reads the prefix cache: tokens and kept sets are those of a cold run, in float32.

It reads its protected tokens: a key behind the pin gets attention from queries behind the pin only, and these
are computed either way. Without scores it also reads what it will free: a token's rank then comes of its key
and of its neighbours'. Each eviction ranks by keys alone, so what the scores' memory holds between two
evictions has no meaning.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from h2o_vllm.blocks.plan import Eviction
from tests.engine.conftest import BLOCK_SIZE, Engine
from tests.engine.fidelity import Seen, run_to_the_end

pytestmark = pytest.mark.e2e

SLOW = pytest.mark.slow
LENGTH = 330
PREFIX = 200
"""Protected tokens: 224 in whole blocks."""
BY_KEY = {"kv_budget": 0.3, "kv_policy": "key"}
OTHERS: list[dict[str, Any] | None] = [
    None,
    BY_KEY | {"kv_recent": 0.25},
    BY_KEY | {"kv_budget": 0.5},
    {"kv_budget": 0.1, "kv_protect": 100},
    {"kv_budget": 0.1, "kv_protect": PREFIX, "kv_policy": "mean"},
    {"kv_budget": 0.1},
    {"kv_budget": 0.1, "kv_policy": "window"},
]
"""Who has the same prompt: some free what it frees, in the same step, and some add to its scores."""


def assert_same(cold: Seen, warm: Seen, *, ranked_from: int | None) -> None:
    """The same answer from the same tokens, in the same slots; with the same scores from a token on."""
    assert warm.tokens == cold.tokens
    for step, other in zip(warm.logprobs, cold.logprobs, strict=True):
        for token, entry in step.items():
            assert entry.logprob == pytest.approx(other[token].logprob, abs=2e-3)
    close = {"rtol": 2e-3, "atol": 2e-3}
    for layer in range(len(cold.keys)):
        torch.testing.assert_close(warm.keys[layer], cold.keys[layer], **close)
        torch.testing.assert_close(warm.values[layer], cold.values[layer], **close)
        if ranked_from is not None:
            # Those of pinned tokens are anybody's, and nobody looks at them.
            scores, expected = (
                warm.scores[layer][:, ranked_from:],
                cold.scores[layer][:, ranked_from:],
            )
            torch.testing.assert_close(scores, expected, **close)


class Meetings:
    """Counts pairs of evictions that rank a block in common, as they come to the worker."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        state = engine.worker._state
        compact = state.compact

        def counting(evictions: Sequence[Eviction]) -> None:
            for one, other in itertools.combinations(evictions, 2):
                self.count += not one.ranked_blocks.isdisjoint(other.ranked_blocks)
            compact(evictions)

        patch.setattr(state, "compact", counting)


@pytest.mark.parametrize(
    ("asked", "read", "meets"),
    [
        pytest.param({"kv_policy": "attention", "kv_protect": PREFIX}, 224, False),
        pytest.param({"kv_policy": "window", "kv_protect": PREFIX}, 320, False, marks=SLOW),
        pytest.param(BY_KEY | {"kv_protect": PREFIX}, 256, False, marks=SLOW),
        pytest.param(BY_KEY | {"kv_protect": 50}, 224, True),
        pytest.param(BY_KEY, 224, True, marks=SLOW),
        pytest.param(BY_KEY | {"kv_delay": 10}, 224, True, marks=SLOW),
        pytest.param(BY_KEY | {"kv_prefill_tokens": 192}, 32, True, marks=SLOW),
    ],
    ids=str,
)
def test_law05_cold_and_warm_runs_are_one(
    clean: Engine,
    text_tokens: list[int],
    asked: dict[str, Any],
    read: int,
    meets: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warm one among others, which read the prompt, and free the same blocks in one step (``meets``)."""
    prompt, asked = text_tokens[400 : 400 + LENGTH], {"kv_budget": 0.3, "kv_protect": 0, **asked}
    cold = run_to_the_end(clean, prompt, asked)
    assert cold.report["tokens_cached"] == 0 and cold.report["tokens_evicted"] > 0
    pinned = cold.report["tokens_protected"]
    assert pinned == -(-asked["kv_protect"] // BLOCK_SIZE) * BLOCK_SIZE
    assert clean.llm.reset_prefix_cache()
    # What it may read, and what it may not: all of its prompt, of a request without a budget.
    clean.generate([prompt], max_tokens=1)
    meetings = Meetings(clean, monkeypatch)
    warm = run_to_the_end(clean, prompt, asked, [(prompt, one) for one in OTHERS])
    assert warm.report == cold.report | {"tokens_cached": read}
    assert_same(cold, warm, ranked_from=pinned if asked["kv_policy"] == "attention" else None)
    assert (meetings.count > 0) >= meets
    clean.scheduler.blocks.check_integrity(idle=True)
