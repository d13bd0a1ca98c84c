# SPDX-License-Identifier: Apache-2.0
"""Files of rows: appended, interrupted, read again; and the published ones, by the code of today."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from loadtest.common.results import RESULTS, append_rows, read_rows, result_file, result_path


def test_rows_are_appended_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    assert read_rows(path) == []
    append_rows(path, [{"a": 1}, {"b": [2]}])
    append_rows(path, [{"c": "é"}])
    assert read_rows(path) == [{"a": 1}, {"b": [2]}, {"c": "é"}]


def test_a_line_that_was_cut_off_swallows_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    append_rows(path, [{"c": 3}])
    assert read_rows(path) == [{"a": 1}, {"c": 3}]


def test_what_is_no_row_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not an object"):
        read_rows(path)


def test_a_file_has_its_name_or_its_date(tmp_path: Path) -> None:
    assert result_path("soak", tmp_path, "mine") == tmp_path / "mine.jsonl"
    assert result_path("soak").parent == RESULTS
    assert result_path("soak").name.startswith("soak-20")


def published(pattern: str) -> Path:
    return next(iter(sorted(RESULTS.glob(f"{pattern}.jsonl"))))


def test_published_comparisons_are_reported(tmp_path: Path) -> None:
    from loadtest.http.report import main

    path = published("locust-cpu-*")
    assert main([str(path), "--out", str(tmp_path)]) == 0
    again = (tmp_path / path.with_suffix(".md").name).read_text()
    assert again == path.with_suffix(".md").read_text()


@pytest.mark.parametrize("pattern", ["bench-cpu-*-tight", "bench-cpu-*-ample", "bench-cpu-*-idle"])
def test_published_benchmarks_are_drawn(pattern: str, tmp_path: Path) -> None:
    from loadtest.engine.plot import plot_bench
    from loadtest.engine.tables import measured_table, ratio_table
    from loadtest.engine.workloads import SUITES

    rows = read_rows(published(pattern))
    assert "| h2o |" in measured_table(rows)
    assert "| stock" in ratio_table(rows, SUITES["cpu"])
    assert plot_bench(rows, SUITES["cpu"], tmp_path / "bench.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("about", "device"),
    [({}, "two cores"), ({"gpu": None}, "two cores"), ({"gpu": {"name": "H200"}}, "H200"),
     ({"gpu": "H200"}, "H200")],
)  # fmt: skip
def test_a_picture_names_what_was_measured(about: dict[str, Any], device: str) -> None:
    from loadtest.common.plots import caption

    row = {"machine": "two cores", "date": "2026-11-26T04:00", **about}
    assert caption(row, "8b", None) == f"8b, {device}, 2026-11-26"


def test_published_gpu_benchmarks_are_drawn(tmp_path: Path) -> None:
    from loadtest.engine.plot import plot_bench
    from loadtest.engine.tables import ratio_table
    from loadtest.engine.workloads import SUITES

    rows = read_rows(published("bench-cuda-*"))
    assert "| 2k-tight | h2o | stock |" in ratio_table(rows, SUITES["cuda"])
    assert plot_bench(rows, SUITES["cuda"], tmp_path / "bench.png").stat().st_size > 10_000


def test_published_kernel_times_are_drawn(tmp_path: Path) -> None:
    from loadtest.kernels.plot import plot_kernels

    path = plot_kernels(read_rows(published("kernels-cpu-*")), tmp_path / "kernels.png")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["cadence", "foresight"])
def test_published_reference_runs_are_reported(kind: str, tmp_path: Path) -> None:
    from importlib import import_module

    module = import_module(f"loadtest.quality.{kind}_report")
    path = published(f"{kind}-cpu-*")
    rows = read_rows(path)
    assert module.report(rows, path.stem) == path.with_suffix(".md").read_text()
    assert module.plot(rows, tmp_path / "it.png").stat().st_size > 10_000


def test_published_quality_is_reported() -> None:
    from loadtest.quality.figures import Figures
    from loadtest.quality.rows import read_rows as read_samples
    from loadtest.quality.tables import markdown

    path = published("quality-cpu-*-xsum")
    runs, rows = read_samples([path])
    _, _, page = path.with_suffix(".md").read_text().partition(".png)\n\n")
    assert markdown(Figures.of(rows), runs) == page


def test_published_soak_is_drawn(tmp_path: Path) -> None:
    from loadtest.reliability.soak_plot import plot_soak

    description, *rows = read_rows(published("soak-cpu-*"))
    assert plot_soak(description, rows, tmp_path / "soak.png").stat().st_size > 10_000


def test_a_folder_is_no_file_of_rows(tmp_path: Path) -> None:
    assert result_file(str(tmp_path / "new" / "rows.jsonl")).name == "rows.jsonl"
    with pytest.raises(argparse.ArgumentTypeError, match="got the folder"):
        result_file(str(tmp_path))
