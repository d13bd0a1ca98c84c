# SPDX-License-Identifier: Apache-2.0
"""What the server tests share: reports as the engine sends them, and a stand-in for vLLM's app."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_vllm.config import H2OConfig


def engine_report(**changes: Any) -> dict[str, Any]:
    """One sequence's report, with the keys that the scheduler sends."""
    return {
        "budget": 0.2,
        "budget_tokens": 20,
        "recent": 0.5,
        "sinks": 0,
        "policy": "h2o",
        "tokens_seen": 100,
        "tokens_held": 32,
        "tokens_evicted": 68,
        "blocks_freed": 2,
        "peak_blocks": 4,
        "block_size": 32,
    } | changes


@pytest.fixture
def config() -> H2OConfig:
    return H2OConfig(kv_budget_min=0.05, kv_budget_max=1.0)
