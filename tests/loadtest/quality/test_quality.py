# SPDX-License-Identifier: Apache-2.0
"""The quality run: its lines, its rows, what is left of an interrupted one, its command line."""

from pathlib import Path

import pytest

from loadtest.quality.lines import FULL, Point, parse_line
from loadtest.quality.rows import latest, read_rows
from tests.loadtest.quality.quality_words import Words, run


def test_a_line_carries_fields() -> None:
    line = parse_line("h2o,protect=4", recent=0.3)
    assert Point(line, 0.2).fields == {
        "kv_policy": "h2o", "kv_budget": 0.2, "kv_delay": 0, "kv_protect": 4, "kv_recent": 0.3,
    }  # fmt: skip
    # A line means what its name says, whatever the server's default is.
    assert Point(parse_line("h2o,delay=8"), 0.2).fields["kv_delay"] == 8
    assert Point(parse_line("random"), 0.2).fields["kv_protect"] == 0
    assert Point(parse_line("random,protect=prompt"), 0.2).fields["kv_protect"] == "prompt"
    assert Point(parse_line("h2o,heads=shared,delay=8"), 0.2).fields["kv_heads"] == "shared"
    assert parse_line("value+key,recent=1").extras == (("kv_recent", 1),)
    assert FULL.fields == {}
    with pytest.raises(ValueError, match="delay=8"):
        parse_line("h2o,many")


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(whole, Words(), ["h2o", "window"], (0.2,))
    lines = whole.read_text().splitlines(keepends=True)
    # Killed in the middle of a line.
    cut.write_text("".join(lines[:40]) + lines[40][:25])
    model = Words()
    run(cut, model, ["h2o", "window"], (0.2,))
    _, rows = read_rows([cut])
    assert latest(rows).keys() == latest(read_rows([whole])[1]).keys()
    assert len(rows) == len(latest(rows)), "nothing twice"
    assert len(model.requests) < len(lines) - 1, "what was there was not asked again"
    model = Words()
    run(cut, model, ["h2o", "window"], (0.2,))
    assert not model.requests, "nothing was left"
