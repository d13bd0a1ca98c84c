# SPDX-License-Identifier: Apache-2.0
"""Files of rows: appended, interrupted, read again; and the published ones, by the code of today."""

import csv
import datetime
from pathlib import Path

import pytest

from loadtest.common.results import RESULTS, append_rows, read_rows


def test_a_line_that_was_cut_off_swallows_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    append_rows(path, [{"c": 3}])
    assert read_rows(path) == [{"a": 1}, {"c": 3}]


def published(pattern: str) -> Path:
    return next(iter(sorted(RESULTS.glob(f"{pattern}.jsonl"))))


@pytest.mark.parametrize("pattern", ["bench-cpu-*-zen5", "bench-cpu-*-zen5-bounded"])
def test_published_benchmarks_are_drawn(pattern: str, tmp_path: Path) -> None:
    from loadtest.engine.plot import plot_bench
    from loadtest.engine.suites import SUITES
    from loadtest.engine.tables import measured_table, ratio_table

    rows = read_rows(published(pattern))
    assert "| h2o |" in measured_table(rows)
    assert "| stock" in ratio_table(rows, SUITES["cpu"])
    assert plot_bench(rows, SUITES["cpu"], tmp_path / "bench.png").stat().st_size > 10_000


def test_every_published_figure_can_be_traced() -> None:
    rows = list(csv.DictReader((RESULTS / "published.csv").open()))
    assert len({(row["what"], row["machine"], row["date"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["what"] and row["command"] and row["commit"] and row["machine"]
        datetime.date.fromisoformat(row["date"])
        low, value, high = (row[name] and float(row[name]) for name in ("low", "value", "high"))
        assert value != "" or low != "", row
        assert "" in (low, value, high) or low <= value <= high, row
