# SPDX-License-Identifier: Apache-2.0
"""The benchmark beside busy processes: what is planned, what is busy, and what the table says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from loadtest.engine.busy import Measurement, main, planned, table
from loadtest.engine.busy_run import VARIANTS, busy


def test_variants_take_turns_and_everything_is_measured_once() -> None:
    plan = list(planned([0, 1], ["h2o", "spinning"], 2))
    assert len(plan) == len(set(plan)) == 2 * 2 * 2
    assert [one.variant for one in plan[:4]] == ["h2o", "spinning", "spinning", "h2o"]
    assert [one.busy for one in plan[:4]] == [0, 0, 1, 1]
    assert Measurement(1, 0, "h2o").measured_by({"round": 1, "busy": 0, "variant": "h2o"})


def test_as_many_processes_compute_as_were_asked_for_and_end_with_the_block() -> None:
    me = psutil.Process()
    before = {child.pid for child in me.children()}
    with busy(2):
        others = [child for child in me.children() if child.pid not in before]
        assert len(others) == 2
        deadline = time.monotonic() + 30
        while not all(child.cpu_times().user > 0.1 for child in others):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert {child.pid for child in me.children()} <= before
    with busy(0):
        assert {child.pid for child in me.children()} <= before


def test_what_is_compared_is_ours_the_same_spinning_and_vllms_layout() -> None:
    assert VARIANTS["h2o"] == {}
    assert VARIANTS["spinning"] and VARIANTS["one-core"]


def test_table_has_medians_ranges_and_gaps() -> None:
    speeds = {("h2o", 0): (10.0, 12.0, 11.0), ("h2o", 1): (5.0,), ("spinning", 0): (9.0,)}
    rows = [
        {"variant": variant, "busy": count, "tok_per_s": speed}
        for (variant, count), found in speeds.items()
        for speed in found
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "| tok/s | 0 busy | 1 busy |"
    assert lines[2] == "| `h2o` | 11.0 (10.0-12.0) | 5.0 |"
    assert lines[3] == "| `spinning` | 9.0 | - |"


@pytest.mark.e2e
@pytest.mark.slow
def test_an_engine_is_measured_quiet_and_busy(tiny: list[str], tmp_path: Path) -> None:
    main([
        "--variants", "h2o", "--busy", "0", "1", "--rounds", "1", "--requests", "5",
        "--prompt-tokens", "32", "--output-tokens", "4", *tiny,
    ])  # fmt: skip
    (file,) = tmp_path.glob("busy-cpu-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["busy"] for row in rows] == [0, 1]
    assert all(row["tok_per_s"] > 0 for row in rows)
