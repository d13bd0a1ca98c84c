# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a row is a line
"""The report says why a request that may evict has evicted nothing."""

from typing import Any

import pytest

from h2o_vllm.blocks.counts.report import request_report
from h2o_vllm.blocks.counts.settling import schedule_of
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for

BUDGET = {"kv_budget": 0.2}


@pytest.mark.parametrize(
    ("asked", "prompt", "seen", "reason"),
    [
        ({}, 1000, 1200, "kv_budget is 1, or kv_exact is true"),
        ({"kv_exact": True}, 1000, 1200, "kv_budget is 1, or kv_exact is true"),
        (BUDGET, 36, 95, "the prompt is protected (kv_protect); of the other 31 tokens 31 may stay: no bu"),
        (BUDGET | {"kv_protect": 0}, 36, 95, "95 of 95 tokens may stay, and no budget is below kv_min_tokens"),
        ({"kv_budget": 0.95, "kv_protect": "ends"}, 513, 530, "the ends of the prompt are protected (kv_protect); of"),
        (BUDGET | {"kv_protect": 64}, 900, 190, "the first 64 tokens are protected (kv_protect); of the othe"),
        ({"kv_budget": 0.99, "kv_protect": 0}, 1000, 1100, "1089 of 1100 tokens may stay, and whole blocks are freed"),
        (BUDGET, 1000, 1010, "the answer ended within kv_delay, 16 tokens"),
        (BUDGET | {"kv_elastic": True}, 1000, 1200, "memory was never short (kv_elastic)"),
        (BUDGET | {"kv_evict_from": 1300}, 1000, 1200, "evictions begin at 1300 tokens (kv_evict_from)"),
        (BUDGET | {"kv_settle_tokens": 1024}, 1000, 1200, "the first segment settles at 1280 tokens (kv_settle"),
        ({"kv_prefill_tokens": 512}, 500, 700, "the prompt is within its bound of 512 tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_why_nothing_was_evicted(
    asked: dict[str, Any], prompt: int, seen: int, reason: str
) -> None:
    budget = resolve_for(H2OConfig(kv_exact_drafts=4), asked, prompt)
    schedule = schedule_of(budget, 32, prompt)
    report = request_report(schedule, seen, 0, 38, cached=0, squeezed_at=None)
    assert str(report["nothing_evicted_reason"]).startswith(reason)
    assert request_report(schedule, seen, 1, 38, 0, 1016)["nothing_evicted_reason"] is None


def test_a_share_above_the_floor_is_not_blamed_on_it_beside_a_protected_end() -> None:
    config = H2OConfig(kv_budget=0.9, kv_protect_max=64)
    schedule = schedule_of(resolve_for(config, {}, 180), 32, 180)
    report = request_report(schedule, 199, 0, 38, cached=0, squeezed_at=None)
    assert report["budget_tokens"] - 32 > config.kv_min_tokens
    assert report["budget_tokens"] - report["tokens_protected"] <= config.kv_min_tokens
    assert "whole blocks are freed" in report["nothing_evicted_reason"]
