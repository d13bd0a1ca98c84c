# SPDX-License-Identifier: Apache-2.0
"""Locust itself, in its own process (gevent patches it), against the mock server."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadtest.http.records import Record, read_runs, summarise
from tests.loadtest.http.mock_server import mock_server
from tests.processes import python

ROOT = Path(__file__).parents[3]


def locust(url: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "locust", "-f", "loadtest/http/locustfile.py", "--headless"]
    command += ["--host", url, "--json", *options]
    return python(*command, cwd=ROOT, environment=environment, timeout=60)


def entries(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Locust's own rows by name."""
    # The last list: workers print theirs too, which are empty.
    start = done.stdout.rindex("\n[\n    {")
    return {row["name"]: row for row in json.JSONDecoder().raw_decode(done.stdout, start + 1)[0]}


def overlap(records: list[Record]) -> int:
    """How many requests were unanswered at most.

    A user asks again at the moment of the answer, and times are rounded to a tenth of a millisecond.
    """
    return max(
        (sum(one.at <= other.at < one.end - 0.001 for one in records) for other in records),
        default=0,
    )


@pytest.mark.alone
def test_closed_loop_of_mixed_budgets_with_rows_file_report_and_gate(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with mock_server(ttft=0.15, itl=0.02) as url:
        done = locust(
            url, "-u", "4", "-r", "4", "--requests", "12", "--budgets", "1.0:1,0.2:2",
            "--output-tokens", "20", "--warmup", "1", "--slo", "ttft_p99=5,itl_p50[kv=0.2]=0.001",
            "--jsonl", str(file), LOADTEST_PROMPT_TOKENS="300",
        )  # fmt: skip
    # One objective is not met.
    assert done.returncode == 3, done.stderr
    assert "itl_p50[kv=0.2] <= 0.001" in done.stdout
    rows = entries(done)
    counts = {name: row["num_requests"] for name, row in rows.items()}
    assert counts == {
        "/v1/completions[kv=0.2]": 8, "ttft[kv=0.2]": 8, "itl[kv=0.2]": 8 * 19, "tok/s[kv=0.2]": 8,
        "/v1/completions[kv=1]": 4, "ttft[kv=1]": 4, "itl[kv=1]": 4 * 19, "tok/s[kv=1]": 4,
    }  # fmt: skip
    (run,) = read_runs(file)
    assert run.description["settings"]["prompt_tokens"] == 300
    assert "api_key" not in run.description["settings"]
    assert len(run.records) == 12
    # Locust's table and the file have the same times, and the server is never early.
    for label, summary in summarise(run.records).items():
        if label in ("kv=1", "kv=0.2"):
            total = 1000 * sum(summary.samples["ttft"])
            assert rows[f"ttft[{label}]"]["total_response_time"] == pytest.approx(total, rel=1e-3)
            assert min(summary.samples["ttft"]) > 0.149
            assert min(summary.samples["latency"]) > 0.149 + 19 * 0.02
    # No user has two requests at once.
    assert overlap(run.records) == 4
    assert "| kv=0.2 | 8 | 0 |" in done.stdout


@pytest.mark.alone
@pytest.mark.slow
def test_open_loop_keeps_its_rate_whatever_the_server_does(tmp_path: Path) -> None:
    """One place of 0.53 s takes two requests per second; twelve per second come all the same.

    The test ends with its last request, not with a time: a busy machine gets as many.
    """
    file = tmp_path / "run.jsonl"
    with mock_server(ttft=0.15, itl=0.02, max_running=1) as url:
        done = locust(
            url, "-u", "3", "-r", "100", "--requests", "10",
            "--arrival", "open", "--rate", "4", "--output-tokens", "20", "--warmup", "0",
            "--jsonl", str(file),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = read_runs(file)
    assert len(run.records) == 10
    assert all(record.whole for record in run.records)
    # Of a closed loop with three users no more than three wait at a time.
    assert overlap(run.records) > 3
