# SPDX-License-Identifier: Apache-2.0
"""One request that is many times longer than the pool: it ends, and what it holds stays flat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.common.results import read_rows
from loadtest.engine.endless import _seen, markdown, plot


def test_the_page_says_how_often_the_pool_was_passed(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "command": "c", "machine": "m", "commit": "1", "date": "d", "versions": {"vllm": "1"},
        "model": "tiny", "dtype": "float32", "eager": True, "block_size": 32, "pool_blocks": 10,
        "prompt_tokens": 1000, "budget": 128, "blocks_peak": 7, "prompt_blocks": [4, 5, 5],
        "blocks": [5, 5, 6, 5], "tokens": [1001, 1051, 1101, 1151], "gap_ms": [4.0, 4.0, 5.0, 6.0],
        "report": {"tokens_seen": 3200, "tokens_held": 160},
    }  # fmt: skip
    text = markdown(row)
    assert "3,200 tokens went through it, 10.0 times what it holds; 160 were held" in text
    assert "blocks in use: 7 at the most, of 10" in text
    assert "4.0 ms in the answer's first quarter, 6.0 ms in its last" in text
    # Nothing is lost before 160 tokens are held; then chunks of one length.
    assert _seen(row) == [128, 160, 580]
    pytest.importorskip("matplotlib")
    assert plot(row, tmp_path / "row.png").stat().st_size > 10_000


@pytest.mark.e2e
@pytest.mark.slow
def test_a_request_of_four_pools_is_served_in_one(tiny: list[str], tmp_path: Path) -> None:
    lengths = (
        "--length",
        "1300",
        "--prompt-tokens",
        "900",
        "--pool-tokens",
        "320",
        "--budget",
        "128",
    )
    subprocess.run(
        [sys.executable, "-m", "loadtest.engine.endless", *tiny, "--eager", *lengths],
        check=True,
        timeout=300,
    )
    (row,) = read_rows(next(tmp_path.glob("endless-cpu-*.jsonl")))
    # The last token is sampled, and computed by nobody.
    assert row["report"]["tokens_seen"] == 1299
    blocks = row["prompt_blocks"] + row["blocks"]
    assert max(blocks) <= row["blocks_peak"] <= row["pool_blocks"] == 10
    # Flat, once the prompt's bound has given way to the budget.
    assert min(row["blocks"]) >= 4 and max(row["blocks"][1:]) <= 6
    assert row["report"]["tokens_held"] <= 128 + 32
