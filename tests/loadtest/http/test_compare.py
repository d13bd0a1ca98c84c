# SPDX-License-Identifier: Apache-2.0
"""The comparison: alternating rounds under Locust, what is read from servers, and the report."""

from pathlib import Path

import pytest

from loadtest.http import compare, report
from loadtest.http.records import Record, Run, read_runs
from tests.loadtest.http.mock_server import mock_server

ABOUT = {
    "machine": "m",
    "versions": {"vllm": "0"},
    "date": "2026-01-01",
    "commit": "c",
    "command": "x",
}


@pytest.mark.slow
def test_rounds_alternate_and_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "describe_run", lambda module: dict(ABOUT))
    with mock_server(ttft=0.005, itl=0.001) as url:
        compare.main(
            ["--url", url, "--rounds", "2", "--users", "4", "--requests", "4",
             "--output-tokens", "8", "--out", str(tmp_path), "--name", "try"]
        )  # fmt: skip
    runs = read_runs(tmp_path / "try.jsonl")
    order = [(run.description["round"], run.description["variant"]) for run in runs]
    assert order == [(0, "full KV"), (0, "kv_budget 0.2"), (1, "kv_budget 0.2"), (1, "full KV")]
    assert [len(run.records) for run in runs] == [4] * 4
    salts = {run.description["settings"]["cache_salt"] for run in runs}
    assert len(salts) == 4
    prompts = [[one.prompt_tokens for one in run.records] for run in runs]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert "| full KV | 2 |" in (tmp_path / "try.md").read_text()
    assert "round 2 full KV" in capsys.readouterr().out


def compared() -> list[Run]:
    """Two rounds: 100 and 90 tokens per second full, 200 and 270 with a budget."""
    speeds = [
        ("full KV", 0, 100),
        ("kv_budget 0.2", 0, 200),
        ("full KV", 1, 90),
        ("kv_budget 0.2", 1, 270),
    ]
    return [
        Run(
            {**ABOUT, "variant": name, "round": number, "server": {"running_mean": speed / 10}},
            [Record("kv=0.2", 0.0, ttft=0.1, latency=1.0, gaps_ms=[10.0], output_tokens=speed)],
        )
        for name, number, speed in speeds
    ]


def test_ratio_is_taken_within_a_round() -> None:
    text = report.markdown(compared(), [])
    # 2.0 and 3.0, not the ratio of the medians.
    assert "| kv_budget 0.2 | 2 | 235.0 (200.0-270.0) | **2.50 (2.00-3.00)** |" in text
    assert "| full KV | 2 | 95.0 (90.0-100.0) |  |" in text
    assert "| 23.5 |" in text
