# SPDX-License-Identifier: Apache-2.0
"""``python -m loadtest.theory`` from texts to tables, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.results import read_rows
from loadtest.common.tiny_model import make_tiny_model
from loadtest.theory.__main__ import main, measure
from loadtest.theory.figures import by_head, by_query, spread
from loadtest.theory.settings import parse_arguments

pytestmark = pytest.mark.usefixtures("single_thread")


def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "model").mkdir()
    model = make_tiny_model(tmp_path / "model", default_model_dir())
    out = tmp_path / "rows.jsonl"
    command = [
        "--model", str(model), "--out", str(out), "--prompt-tokens", "64", "--forced-tokens", "64",
        "--budgets", "0.25", "--queries", "2", "--triples", "4", "--keys", "5",
        "--kept", "2", "--texts",
    ]  # fmt: skip
    main([*command, "1"])
    run, *rows = read_rows(out)
    assert run["kind"] == "run" and run["settings"]["model"] == "model"
    # Of each of three layers: three functions, two evictions, output and control of two grounds, the
    # grounds, four rankers.
    assert len(rows) == 3 * (3 + 2 + 4 + 2 + 4)
    steps = by_head(rows, "alpha", measure="steps", case="h2o", budget=0.25)
    assert steps.shape == (3, 2) and bool((steps > 0).all())
    assert not by_head(rows, "returns", measure="returns", case="scores, all keys").any()
    table = out.with_suffix(".md").read_text()
    assert "| most attended | top-k |" in table and "| half recent | 0.25 |" in table
    assert "64 tokens ahead" in table and "256 tokens ahead" not in table
    assert out.with_suffix(".png").stat().st_size > 10_000

    measure(parse_arguments([*command, "2"]))
    again = read_rows(out)
    assert again[: len(rows) + 1] == [run, *rows] and len(again) == 2 * (len(rows) + 1)
    with pytest.raises(SystemExit, match="measured with"):
        measure(parse_arguments([*command, "2", "--seed", "1"]))
    with pytest.raises(SystemExit):
        parse_arguments([*command, "1", "--kept", "5"])
    assert "--kept: got 5, wanted 1 to 4" in capsys.readouterr().err


def test_a_heads_figure_is_its_mean_over_texts() -> None:
    rows = [
        {"text": text, "layer": layer, "values": {"eps": [value, 10 * value]}}
        for text, layer, value in (("a", 1, 1.0), ("a", 0, 4.0), ("b", 0, 6.0), ("b", 1, 3.0))
    ]
    means = by_head(rows, "eps")
    assert means.tolist() == [[5, 50], [2, 20]]
    assert spread(means, "{:.1f}") == "12.5 (2.0 to 50.0)"
    assert np.sort(by_query(rows, "eps", text="b")).tolist() == [3, 6, 30, 60]
