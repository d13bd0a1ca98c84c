# SPDX-License-Identifier: Apache-2.0
"""A tiny model that vLLM's server can serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model
from tests.engine.conftest import model_dir
from tests.server.live_server import KEY, MODEL

__all__ = ["model_dir"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), default_model_dir())


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> list[str]:
    """Options that serve a model which starts and speaks fast."""
    return ["--model", str(tiny_model), "--served-model-name", MODEL, "--api-key", KEY]
