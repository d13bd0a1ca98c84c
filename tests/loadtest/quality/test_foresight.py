# SPDX-License-Identifier: Apache-2.0
"""What knowing the future would be worth: table and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.quality.foresight import RANKINGS
from loadtest.quality.foresight_report import LABELS, plot, report


def row(text: str, ranking: str, nll: float) -> dict[str, Any]:
    return {
        "date": "2026-11-20T00:00:00+00:00", "commit": "abc", "machine": "a machine",
        "versions": {"torch": "2"}, "command": "python -m loadtest.quality.foresight", "text": text,
        "budget": 0.2, "ranking": ranking, "prompt_tokens": 64, "tokens": 16, "nll_full": 2.0,
        "nll": nll, "held": 20,
    }  # fmt: skip


def test_table_and_picture(tmp_path: Path) -> None:
    assert [ranking.name for ranking in RANKINGS] == list(LABELS)
    rows = [row(text, "past", nll) for text, nll in (("one", 2.2), ("two", 2.6))]
    # Resumed in another order: the columns are still the texts'.
    rows += [row(text, "future", nll) for text, nll in (("two", 2.4), ("one", 2.0))]
    table = report(rows, "foresight")
    assert "| 0.2 | h2o | 20.00 (10.00 to 30.00) | 10.0 | 30.0 |" in table
    assert "| 0.2 | knows all later attention | 10.00 (0.00 to 20.00) | 0.0 | 20.0 |" in table
    pytest.importorskip("matplotlib")
    assert plot(rows, tmp_path / "foresight.png").stat().st_size > 10_000
