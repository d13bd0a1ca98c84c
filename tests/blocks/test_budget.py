# SPDX-License-Identifier: Apache-2.0
"""The counts everything else follows from."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_vllm.blocks.counts.budget import (
    blocks_freed,
    budget_tokens,
    next_eviction,
    recent_from,
    recent_tokens,
)
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve, resolve_for

BLOCK_SIZES = st.sampled_from([16, 32, 128])
COUNTS = st.integers(0, 20_000)


@st.composite
def budgets(draw: st.DrawFn) -> RequestBudget:
    config = H2OConfig(
        kv_protect=0,
        kv_min_tokens=draw(st.sampled_from([1, 16, 128, 500])),
        kv_budget_min=draw(st.sampled_from([0.01, 0.05])),
    )
    recent = draw(st.floats(0, 1))
    if draw(st.booleans()):
        return resolve(config, {"kv_budget": draw(st.floats(0.05, 1)), "kv_recent": recent})
    return resolve(config, {"kv_budget_tokens": draw(st.integers(1, 9000)), "kv_recent": recent})


@pytest.mark.parametrize(
    ("fraction", "seen", "kept"),
    [(0.2, 1500, 300), (0.2, 1501, 301), (0.1, 30, 30), (0.1, 1290, 129), (1.0, 777, 777)],
    ids=["exact", "rounds-up", "floor", "above-floor", "lossless"],
)
def test_a_fraction_of_the_tokens_seen_is_kept(fraction: float, seen: int, kept: int) -> None:
    assert budget_tokens(resolve(H2OConfig(kv_protect=0), {"kv_budget": fraction}), seen) == kept


def test_the_newest_tokens_share_is_the_requests_the_servers_or_the_policys() -> None:
    ours, theirs = (
        H2OConfig(kv_calibration="unread"), H2OConfig(kv_recent=0.7, kv_calibration="unread")
    )  # fmt: skip
    for policy, share in (("h2o", 0.5), ("value+key", 0.25), ("random", 0.05)):
        asked = {"kv_policy": policy}
        assert resolve(ours, asked).recent == share
        assert resolve(theirs, asked).recent == 0.7
        assert resolve(theirs, {**asked, "kv_recent": 0.0}).recent == 0.0
    assert resolve(ours, None).recent == ours.applied["kv_recent"] == 0.25


@pytest.mark.parametrize(
    ("server", "asked", "prompt", "recent"),
    [
        ({}, {"kv_protect": "prompt"}, 900, 0.8),
        ({"kv_protect": "prompt"}, {}, 900, 0.8),
        ({"kv_protect": "prompt", "kv_protect_max": 600}, {}, 900, 0.25),
        ({"kv_protect": "prompt"}, {"kv_protect": 0}, 900, 0.25),
        ({}, {"kv_protect": 899}, 900, 0.25),
        ({}, {"kv_protect": 900}, 900, 0.8),
        ({}, {}, 512, 0.8),
        ({}, {}, 513, 0.8),
        ({}, {"kv_recent": 0.1}, 512, 0.1),
        ({"kv_recent": 0.3}, {}, 512, 0.3),
        ({}, {"kv_policy": "h2o"}, 512, 0.5),
    ],
)
def test_an_answer_keeps_more_of_its_newest_tokens_where_the_end_of_the_prompt_is_protected(
    server: dict[str, Any], asked: dict[str, Any], prompt: int, recent: float
) -> None:
    assert resolve_for(H2OConfig(kv_budget=0.2, **server), asked, prompt).recent == recent


def test_who_names_no_policy_has_the_servers_or_the_best_that_it_can_rank_by() -> None:
    for config, policy, heads in (
        (H2OConfig(), "value+end+key", "equal"),
        (H2OConfig(kv_calibration="unread"), "predicted+value+end+key", "shared"),
        (H2OConfig(kv_calibration="unread", kv_heads="equal"), "predicted+value+end+key", "equal"),
        (H2OConfig(kv_calibration="unread", kv_policy="h2o"), "attention", "equal"),
    ):
        budget = resolve(config, {"kv_budget": 0.2})
        assert (budget.policy.name, budget.heads) == (policy, heads)
        assert config.default_policy.name == policy
        assert resolve(config, {"kv_policy": "key"}).policy.name == "key"
        named = policy == "attention" or config.kv_calibration is None
        bounded = resolve(config, {"kv_budget": 0.2, "kv_prefill_tokens": 1024})
        assert bounded.policy.name == (policy if named else "predicted+key")
        server = replace(config, kv_prefill_tokens=1024)
        assert server.default_policy == bounded.policy == resolve(server, None).policy
        assert resolve(server, {"kv_prefill_tokens": 0}).policy.name == policy
        assert H2OConfig.from_mapping(config.to_mapping()).default_policy.name == policy


@given(budgets(), COUNTS, BLOCK_SIZES)
def test_held_tokens_stay_within_one_block_of_the_budget(
    budget: RequestBudget, seen: int, block_size: int
) -> None:
    held = seen - blocks_freed(budget, seen, block_size) * block_size
    allowed = budget_tokens(budget, seen)
    assert allowed <= held < allowed + block_size
    assert 0 <= recent_tokens(budget, seen) <= allowed <= seen


@given(budgets(), COUNTS, BLOCK_SIZES)
def test_blocks_once_freed_stay_freed(budget: RequestBudget, seen: int, block_size: int) -> None:
    freed = [blocks_freed(budget, seen + i, block_size) for i in range(3)]
    assert freed == sorted(freed)
    assert freed[-1] - freed[0] <= 1
    windows = [recent_from(budget, seen + i, block_size) for i in range(3)]
    assert windows == sorted(windows)


@given(budgets(), COUNTS, BLOCK_SIZES)
def test_the_recent_window_begins_at_the_nearest_full_block(
    budget: RequestBudget, seen: int, block_size: int
) -> None:
    first = recent_from(budget, seen, block_size)
    start = first * block_size
    exact = seen - recent_tokens(budget, seen)
    assert 0 <= start <= seen
    assert start - exact <= block_size / 2
    assert exact - start <= block_size / 2 or start + block_size > seen


@given(budgets(), st.integers(0, 3000), BLOCK_SIZES, st.integers(1, 600))
def test_next_eviction_is_the_first_count_that_frees_more(
    budget: RequestBudget, seen: int, block_size: int, ahead: int
) -> None:
    now = blocks_freed(budget, seen, block_size)
    expected = next(
        (c for c in range(seen + 1, seen + ahead + 1) if blocks_freed(budget, c, block_size) > now),
        None,
    )
    assert next_eviction(budget, seen, block_size, seen + ahead) == expected


def test_the_newest_tokens_are_a_share_of_what_is_not_protected() -> None:
    budget = replace(
        resolve(H2OConfig(kv_min_tokens=1), {"kv_budget": 0.5, "kv_recent": 0.5}), protect=400
    )
    assert recent_tokens(budget, 1_000) == recent_tokens(replace(budget, protect=0), 600) == 150
