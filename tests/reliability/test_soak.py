# SPDX-License-Identifier: Apache-2.0
"""The soak, for half a minute; ``tests/loadtest/reliability/test_trend.py`` checks what it calls flat."""

import json
from pathlib import Path

import pytest

from tests.processes import python

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_half_a_minute_of_everything_leaves_no_block_and_no_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = ["-m", "loadtest.reliability.soak", "--minutes", "0.4", "--users", "6"]
    command += ["--out", str(tmp_path), "--name", "soak", "--", "--model", str(tiny_model)]
    # CPUs without AVX-512 emulate bfloat16.
    done = python(*command, "--dtype", "float32", timeout=400)
    print(done.stdout, done.stderr[-3000:])
    about, *rows = map(json.loads, (tmp_path / "soak.jsonl").read_text().splitlines())
    assert not [outcome for outcome in about["outcomes"] if outcome.startswith("error")]
    assert {"complete", "stream", "leave", "chat", "refused"} <= set(about["outcomes"])
    assert about["tracebacks"] == 0
    pauses = [row for row in rows if "pause" in row]
    assert len(pauses) >= 2
    assert all(row["quiet"] and row["idle_blocks"] == 0 for row in pauses)
    # Half a minute says nothing of memory or latency; that they were measured and judged, it does.
    assert {verdict["name"] for verdict in about["verdicts"] if verdict["points"] >= 2} >= {
        "rss_mib", "fds", "threads", "latency_s", "idle_blocks",
    }  # fmt: skip
    assert done.returncode in (0, 1)
    assert (done.returncode == 0) is about["flat"]
