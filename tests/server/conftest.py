# SPDX-License-Identifier: Apache-2.0
"""What the server tests share: reports as the engine sends them, and a tiny model to serve."""

from pathlib import Path
from typing import Any

import pytest

from h2o_vllm.blocks.counts.report import request_report
from h2o_vllm.blocks.counts.settling import schedule_of
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model
from tests.server.live_server import KEY, MODEL


def engine_report(**changes: Any) -> dict[str, Any]:
    """One sequence's report, as the scheduler makes it."""
    config = H2OConfig(kv_budget=0.2, kv_policy="h2o", kv_protect=0, kv_min_tokens=16)
    schedule = schedule_of(resolve_for(config, None, 100), 32, 100)
    return request_report(schedule, 100, 2, peak_blocks=4, cached=0, squeezed_at=None) | changes


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
