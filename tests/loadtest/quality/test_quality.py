# SPDX-License-Identifier: Apache-2.0
"""The quality run: its lines, its rows, what is left of an interrupted one, its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_vllm.config.policies import POLICIES, REPEAT_POLICIES, ZAP_POLICIES
from loadtest.quality.generation import GenerationRequest
from loadtest.quality.lines import FULL, Line, Point, default_lines, parse_line, points
from loadtest.quality.measures import MEASURES, Sample
from loadtest.quality.rows import Row, latest, read_rows
from loadtest.quality.runner import plan
from loadtest.quality.settings import parse_arguments, sizes_of
from loadtest.quality.sizes import QUICK, Sizes
from tests.loadtest.quality.quality_words import SIZES, Words, run


def test_lines_come_from_the_policies_there_are() -> None:
    assert default_lines(POLICIES, ()) == [
        name for name in POLICIES if name not in ("full", *REPEAT_POLICIES, *ZAP_POLICIES)
    ]
    assert default_lines(("h2o", "tova", "full"), ("kv_sinks",)) == ["h2o", "tova", "h2o+sinks4"]


def test_a_line_carries_fields() -> None:
    line = parse_line("h2o+sinks4", POLICIES, recent=0.3)
    assert Point(line, 0.2).fields == {
        "kv_policy": "h2o", "kv_budget": 0.2, "kv_delay": 0, "kv_sinks": 4, "kv_recent": 0.3,
    }  # fmt: skip
    # A line means what its name says, whatever the server's default is.
    assert Point(parse_line("h2o+delay8", POLICIES), 0.2).fields["kv_delay"] == 8
    assert Point(parse_line("h2o+shared+delay8", POLICIES), 0.2).fields["kv_heads"] == "shared"
    assert parse_line("h2o+recent1", POLICIES).extras == (("kv_recent", 1.0),)
    assert FULL.fields == {"kv_policy": "full"}
    with pytest.raises(ValueError, match="wanted one of h2o"):
        parse_line("h3o", POLICIES)
    with pytest.raises(ValueError, match="sinks4"):
        parse_line("h2o+many", POLICIES)


def test_every_line_is_measured_at_every_budget_below_one() -> None:
    lines = [Line("h2o", "h2o"), Line("full", "full")]
    assert points(lines, (0.2, 0.1, 1.0)) == [Point(lines[0], 0.2), Point(lines[0], 0.1)]


def test_a_run_writes_every_row_once(tmp_path: Path) -> None:
    run(tmp_path / "rows.jsonl", Words(), ["h2o", "window"], (0.2,))
    _, rows = read_rows([tmp_path / "rows.jsonl"])
    assert len(latest(rows)) == len(rows)
    # Full, full again and two policies; nll and drift of 3, retrieval of 12, long of 2.
    assert len(rows) == 4 * (3 + 3 + 12 + 2)
    assert {row.line for row in rows} == {"full", "full-again", "h2o", "window"}


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(whole, Words(), ["h2o", "window"], (0.2,))
    lines = whole.read_text().splitlines(keepends=True)
    # Killed in the middle of a line.
    cut.write_text("".join(lines[:60]) + lines[60][:25])
    model = Words()
    run(cut, model, ["h2o", "window"], (0.2,))
    _, rows = read_rows([cut])
    assert latest(rows).keys() == latest(read_rows([whole])[1]).keys()
    assert len(rows) == len(latest(rows)), "nothing twice"
    assert len(model.requests) < len(lines) - 1, "what was there was not asked again"
    model = Words()
    run(cut, model, ["h2o", "window"], (0.2,))
    assert not model.requests, "nothing was left"


def test_answers_to_compare_with_are_generated_again_where_something_is_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, Words(), ["h2o"], (0.2,))
    model = Words()
    run(path, model, ["h2o", "window"], (0.2,))
    policies = [task.fields["kv_policy"] for task in model.requests]
    assert policies == ["full"] * 17 + ["window"] * 17


def test_full_kv_that_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, Words(), ["h2o"], (0.2,))
    measures = [MEASURES["nll"]]
    samples = {"forced": measures[0].samples(Words(), SIZES)}
    known = {
        key: Row(*key, {name: value + 0.5 for name, value in row.values.items()}, 1.0)
        for key, row in latest(read_rows([path])[1]).items()
        if key[0] != "h2o"
    }
    wanted = points([parse_line("h2o", POLICIES)], (0.2,))
    todo = plan(wanted, samples, measures, known)
    assert todo.run(Words(), lambda _: None, known) == 3 * 5


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"kind": "request"}\n')
    with pytest.raises(ValueError, match="neither a run nor a sample"):
        read_rows([tmp_path / "other.jsonl"])


def test_options_become_sizes() -> None:
    args = parse_arguments(["--samples", "xsum=7", "forced=2", "--long-tokens", "99"])
    sizes = sizes_of(args)
    assert (sizes.xsum, sizes.forced, sizes.long_tokens) == (7, 2, 99)
    assert sizes.retrieval == Sizes().retrieval
    assert sizes_of(parse_arguments(["--quick"])) == QUICK


@pytest.mark.parametrize(
    "argv",
    [["--samples", "nll=3"], ["--samples", "xsum=x"], ["--budgets", "1.5"], ["--measures", "xsum"]],
)
def test_options_that_cannot_be_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)


def test_a_sample_is_asked_alike_of_every_policy(tmp_path: Path) -> None:
    model = Words()
    run(tmp_path / "rows.jsonl", model, ["h2o", "window", "random"], (0.2, 0.1))
    requests: dict[str, set[GenerationRequest]] = {}
    for task in model.requests:
        sample: Sample = task.tag.sample
        requests.setdefault(sample.name, set()).add(task.request)
    assert all(len(some) == 1 for some in requests.values())
