# SPDX-License-Identifier: Apache-2.0
"""From rows of the quality run to numbers with intervals, and to tables."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.common.statistics import Estimate
from loadtest.quality.figures import Figures
from loadtest.quality.measures import MEASURES
from loadtest.quality.rows import read_rows
from loadtest.quality.tables import cell, markdown
from tests.loadtest.quality.quality_words import Words, run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Figures, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("quality") / "rows.jsonl"
    run(path, Words(), ["random", "window", "h2o"], (0.2, 0.5))
    runs, rows = read_rows([path])
    return Figures.of(rows), runs


def test_full_kv_against_itself_loses_nothing(measured: Any) -> None:
    figures, _ = measured
    loss, *_ = MEASURES["nll"].metrics
    for line in ("full", "full-again"):
        assert figures.figure("nll", loss, line, 1.0)[:3] == (0, 0, 0)


def test_a_figure_is_what_the_samples_say(measured: Any) -> None:
    figures, _ = measured
    loss, nats, *_ = MEASURES["nll"].metrics
    assert figures.figure("nll", nats, "h2o", 0.2).value == pytest.approx(1.8)
    assert figures.figure("nll", loss, "h2o", 0.2).value == pytest.approx(80)
    assert figures.figure("nll", loss, "window", 0.5).value == pytest.approx(100)
    assert figures.figure("nll", loss, "h2o", 1.0) is None


def test_the_report_has_a_table_per_metric_and_every_policy(measured: Any) -> None:
    figures, runs = measured
    text = markdown(figures, runs)
    assert "| policy | 0.2 | 0.5 | 1 |" in text
    assert "| h2o | 80.00 | 50.00 |  |" in text
    assert "| full |  |  | 0.00 |" in text
    assert "| nll | h2o | 0.73 | 0.83 |" in text, "what each policy held"
    assert "| nll | full |" not in text
    assert text.count("**") == 2 * (1 + 6 + 5)


def test_a_cell_shows_the_interval() -> None:
    assert cell(Estimate(2.14, 1.0, 3.2, 8), 1) == "2.1 (1.0 to 3.2)"
    assert cell(Estimate(2.0, 2.0, 2.0, 8), 0) == "2"
    assert cell(None, 1) == ""
