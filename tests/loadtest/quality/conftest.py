# SPDX-License-Identifier: Apache-2.0
"""What the tests of references and ladder share: a small Llama, computed by one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loadtest.quality.ladder.model import LadderModel
from tests.families.random_models import VOCABULARY, one_thread, save_random_model


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose query heads share KV heads."""
    where: Path = tmp_path_factory.mktemp("llama")
    save_random_model("llama-gqa4", str(where))
    return str(where)


@pytest.fixture(scope="module")
def model(directory: str) -> LadderModel:
    """What the ladder reads with."""
    return LadderModel(directory, torch.float32)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """A prompt for it."""
    source = torch.Generator().manual_seed(0)
    drawn: list[int] = torch.randint(3, VOCABULARY, (150,), generator=source).tolist()
    return drawn
