# SPDX-License-Identifier: Apache-2.0
"""What the paper assumes, measured on a small random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtest.quality.assumptions import FIGURES, Reader, measure, returns
from tests.families.random_models import VOCABULARY, one_thread, save_random_model


def test_figures_are_shares_and_what_is_certain_is_one(tmp_path: Path) -> None:
    save_random_model("llama-gqa4", str(tmp_path))
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (90,), generator=source).tolist()
    with one_thread():
        reader = Reader(str(tmp_path))
        found = measure(reader, tokens[:64], tokens[64:], 0.25)
        whole = measure(reader, tokens[:64], tokens[64:70], 1.0)
    assert found.keys() == FIGURES.keys()
    assert all(0 <= value <= 1 for value in found.values())
    assert found["future_chance"] == 0.25
    assert found["local"] < 1
    # What keeps everything has all of the attention.
    assert whole["held"] == pytest.approx(1) and whole["future_h2o"] == 1


def test_one_key_with_all_attention_has_no_diminishing_returns_to_lose() -> None:
    prob = torch.zeros(40)
    prob[7] = 1.0
    assert returns(prob, torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), 0) >= 0.5
