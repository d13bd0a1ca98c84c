# SPDX-License-Identifier: Apache-2.0
"""A model on which whole benchmarks take seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Options that name it, its numbers, and where results go: ``tmp_path``."""
    model = make_tiny_model(tmp_path / "model", default_model_dir(), positions=4096)
    return ["--model", str(model), "--dtype", "float32", "--out", str(tmp_path)]
