# SPDX-License-Identifier: Apache-2.0
"""How two cadences are compared: overlaps, intervals, the table and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.quality.cadence import CADENCES, overlap
from loadtest.quality.cadence_report import LABELS, plot, report


def test_overlap_counts_layers_and_heads_alike() -> None:
    mine = torch.tensor([[[1, 1, 0, 1, 1]], [[0, 1, 1, 1, 1]]]).bool()
    paper = torch.tensor([[[1, 1, 0, 0, 1]], [[1, 1, 0, 0, 1]]]).bool()
    assert overlap(mine, paper, recent_from=2) == {
        "jaccard": pytest.approx((3 / 4 + 2 / 5) / 2),
        "covered": pytest.approx((3 / 3 + 2 / 3) / 2, abs=1e-6),
        "covered_heavy": pytest.approx((2 / 2 + 1 / 2) / 2),
    }


def row(text: int, budget: float, variant: str, nll: float) -> dict[str, Any]:
    return {
        "date": "2026-11-20T00:00:00+00:00", "commit": "abc", "machine": "a machine",
        "versions": {"torch": "2"}, "command": "python -m loadtest.quality.cadence", "text": text,
        "budget": budget, "variant": variant, "prompt_tokens": 64, "tokens": 16, "nll_full": 2.0,
        "nll": nll, "held": 20, "jaccard": 0.9, "covered": 0.95, "covered_heavy": 0.8,
    }  # fmt: skip


def test_table_and_picture_compare_within_a_text(tmp_path: Path) -> None:
    assert [cadence.name for cadence in CADENCES] == list(LABELS)
    rows = [row(text, 0.2, "token", 2.0 + text) for text in range(3)]
    rows += [row(text, 0.2, "block-32", 2.5 + text) for text in (2, 0, 1)]
    table = report(rows, "cadence")
    # Texts differ by 1, cadences by 0.5 in every one of them: no doubt about the difference.
    assert "| +0.5000 (+0.5000 to +0.5000) |" in table
    assert "| one token (paper) | 3.0000 | 50.00 (" in table
    pytest.importorskip("matplotlib")
    assert plot(rows, tmp_path / "cadence.png").stat().st_size > 10_000
