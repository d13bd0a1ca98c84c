# SPDX-License-Identifier: Apache-2.0
"""``python -m loadtest.quality.ladder`` from prompts to tables, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model
from loadtest.quality.figures import Figures
from loadtest.quality.ladder.__main__ import main
from loadtest.quality.ladder.report import markdown, order
from loadtest.quality.ladder.settings import RUNGS, parse_arguments
from loadtest.quality.rows import Row, read_rows

RUN = {
    "settings": {"model": "tiny", "dtype": "float32"}, "machine": "a machine", "date": "2026-11-22T00:00:00",
    "versions": {"torch": "2"}, "commit": "abc", "command": "python -m loadtest.quality.ladder",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("single_thread")


def test_every_default_rung_can_be_read() -> None:
    assert [rung.name for rung in parse_arguments([]).rungs] == list(RUNGS)


def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "model").mkdir()
    model = make_tiny_model(tmp_path / "model", default_model_dir())
    out = tmp_path / "rows.jsonl"
    command = [
        "--model", str(model), "--dtype", "float32", "--out", str(out),
        "--tasks", "niah_single_1", "--samples", "1", "--length", "400", "--answer-tokens", "3",
        "--known-budgets", "0.5", "--delays", "2", "--later-budgets", "0.5", "0.25",
        "--texts", "1", "--prompt-tokens", "96", "--forced-tokens", "40",
        "--threads", "1", "--rungs", "h2o", "snapkv+repeat:layer",
    ]  # fmt: skip
    main([*command, "KVzip"])
    runs, rows = read_rows([out])
    assert len(runs) == 1
    # Full KV, two rungs of ours, and a press; one budget (twice: delayed as well) and two, and one.
    assert len(rows) == len({row.key for row in rows}) == 2 * (1 + 3) + (1 + 3 * 2) + (1 + 3)
    assert {row.line for row in rows if row.measure == "nll"} == {
        "full",
        "h2o",
        "snapkv+repeat:layer",
        "KVzip",
    }
    assert all(0 < row.values["nll"] for row in rows if row.measure == "nll")
    table = out.with_suffix(".md").read_text()
    assert "`snapkv+repeat:layer`" in table and "niah_single_1" in table
    assert "known, evicted 2 tokens after the prompt, 0.5 (1 samples)" in table
    assert out.with_suffix(".png").stat().st_size > 10_000

    main([*command, "KVzip", "window"])
    _, again = read_rows([out])
    assert again[: len(rows)] == rows and {row.line for row in again[len(rows) :]} == {"window"}
    with pytest.raises(SystemExit, match="length 400, not 500"):
        main([*command, "--length", "500"])
    capsys.readouterr()


def test_summaries_are_judged_as_by_the_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rouge_score")
    model = make_tiny_model(tmp_path / "model", default_model_dir())
    article = "###\nArticle: " + "The cat sat on the mat by the river. " * 12 + "Summarize.\n"
    asked = {"article": article, "summary_gt": "A cat sat.", "max_tokens": 24, "stop": ["###"]}
    requests = tmp_path / "xsum.jsonl"
    requests.write_text(f"{json.dumps(asked)}\n" * 2)
    out = tmp_path / "rows.jsonl"
    main([
        "--model", str(model), "--dtype", "float32", "--out", str(out), "--threads", "1",
        "--measures", "xsum", "--xsum", str(requests), "--summaries", "2", "--delays", "0", "24",
        "--rungs", "h2o", "window", "--xsum-budgets", "0.2",
    ])  # fmt: skip
    _, rows = read_rows([out])
    assert {row.measure for row in rows} == {"xsum@0", "xsum@24"}
    assert len(rows) == 2 * 2 * 3
    same = {(row.line, row.measure): row.values["same"] for row in rows}
    assert same["full", "xsum@0"] == same["h2o", "xsum@24"] == same["window", "xsum@24"] == 1
    assert same["window", "xsum@0"] == 0, "nothing can be learnt of this request"
    assert "xsum, evicted 24 tokens after the prompt, 0.2" in out.with_suffix(".md").read_text()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--rungs", "h2o"], "needs --xsum FILE"), (["--xsum", "x", "--rungs", "repeat"], "repeat")],
)
def test_what_summaries_cannot_have_is_said_before_anything_is_loaded(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--measures", "xsum", *options])
    assert complaint in capsys.readouterr().err


def row(line: str, protocol: str, sample: str, found: float, budget: float = 0.25) -> Row:
    return Row(line, budget, protocol, sample, {"found": found}, budget)


def test_what_finds_most_comes_first_and_is_compared_with_full_kv() -> None:
    rows = [row("full", "known", f"vt-{n}", 0.8, 1.0) for n in range(2)]
    rows += [row("h2o", "known", f"vt-{n}", 0.2 * n) for n in range(2)]
    rows += [row("repeat", "known", f"vt-{n}", 0.8) for n in range(2)]
    figures = Figures.of(rows)
    assert order(figures) == ["repeat", "h2o"]
    text = markdown(figures, [RUN])
    assert "| `repeat` | 100 |" in text
    assert "| `h2o` | 12 (0 to 25) |" in text
    assert "| `full` | 80 |" in text
