# SPDX-License-Identifier: Apache-2.0
"""What the server tests share: reports as the engine sends them, and a tiny model to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_vllm.blocks.counts.report import SETTINGS
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model
from tests.server.live_server import KEY, MODEL


def engine_report(**changes: Any) -> dict[str, Any]:
    """One sequence's report, with the keys that the scheduler sends."""
    return {
        "budget": 0.2,
        "budget_tokens": 20,
        **dict.fromkeys(SETTINGS, 0),
        "recent": 0.5,
        "policy": "attention",
        "heads": "equal",
        "elastic": False,
        "exact": False,
        "squeezed_at": None,
        "tokens_seen": 100,
        "tokens_cached": 0,
        "tokens_protected": 0,
        "tokens_held": 32,
        "tokens_evicted": 68,
        "tokens_settled": 0,
        "blocks_freed": 2,
        "peak_blocks": 4,
        "tokens_drafted": 0,
        "tokens_accepted": 0,
        "nothing_evicted_reason": None,
        "block_size": 32,
    } | changes


@pytest.fixture
def config() -> H2OConfig:
    return H2OConfig(kv_budget_min=0.05, kv_budget_max=1.0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), default_model_dir())


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> list[str]:
    """Options that serve a model which starts and speaks fast."""
    return ["--model", str(tiny_model), "--served-model-name", MODEL, "--api-key", KEY]
