# SPDX-License-Identifier: Apache-2.0
"""A tiny model that vLLM's server can talk through, and a server of it with an API key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.tiny_model import make_tiny_model
from tests.engine.conftest import model_dir
from tests.server.live_server import KEY, MODEL, LiveServer

__all__ = ["model_dir"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), default_model_dir())


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> list[str]:
    """Options that serve a model which starts and speaks fast."""
    return ["--model", str(tiny_model), "--served-model-name", MODEL, "--api-key", KEY]


@pytest.fixture(scope="package")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    server = LiveServer(log, *tiny, "--kv-budget-min", "0.05")
    try:
        server.wait_until_up()
        yield server
    finally:
        server.kill()
