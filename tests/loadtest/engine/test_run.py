# SPDX-License-Identifier: Apache-2.0
"""The benchmark on a real engine: forced texts, chats and several answers, by stock vLLM and by ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.engine.bench import main

NAMES = ["elastic-4", "chats", "answers"]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_small_run_writes_every_row(tiny: list[str], tmp_path: Path) -> None:
    options = [
        "--rounds",
        "1",
        "--scale",
        "0.1",
        "--eager",
        "--variants",
        "stock-same-flags",
        "h2o",
    ]
    main([*tiny, *options, "--workloads", *NAMES])
    (path,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["variant"], row["workload"]) for row in rows] == [
        *((variant, "elastic-4") for variant in ("stock-same-flags", "h2o")),
        *((variant, name) for variant in ("stock-same-flags", "h2o") for name in NAMES[1:]),
    ]
    stock, ours = rows[:2]
    assert stock["lossless"] == 1.0 and 0 < stock["nll"] <= ours["nll"] * 1.01
    chats = {row["variant"]: row for row in rows if row["workload"] == "chats"}
    assert all(row["cached_share"] > 0 for row in chats.values()), "later turns find their prompt"
    assert path.with_suffix(".png").exists()
