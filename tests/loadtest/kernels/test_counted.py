# SPDX-License-Identifier: Apache-2.0
"""A first eviction takes a small share of its prompt at any length, as counted and as measured."""

from __future__ import annotations

import json

import pytest

from loadtest.common.results import RESULTS
from loadtest.kernels.first_eviction import DEFAULTS, counted, main

LENGTHS = (2048, 8192, 32_768, 131_072)
TARGET = 0.03


@pytest.mark.parametrize("length", LENGTHS)
def test_work_that_is_counted_stays_below_the_target(length: int) -> None:
    plain, calibrated = (counted(length, ranks) for ranks in DEFAULTS)
    assert 0 < plain["share"] < calibrated["share"] < TARGET / 3
    assert [part["part"] for part in calibrated["parts"]] == [
        "predicted", "value", "end", "key", "places", "moves",
    ]  # fmt: skip


def test_only_places_grow_faster_than_the_prompt() -> None:
    """And they by a binary search per tile, not by a comparison per token."""
    short, long = (
        {part["part"]: part["operations"] for part in counted(length, DEFAULTS[1])["parts"]}
        for length in (LENGTHS[0], LENGTHS[-1])
    )
    grown = {part: long[part] / short[part] for part in short}
    assert {part for part, times in grown.items() if times > LENGTHS[-1] / LENGTHS[0]} == {"places"}
    assert grown["places"] < (LENGTHS[-1] / LENGTHS[0]) ** 2 / 1.5


def test_what_was_measured_is_near_what_is_counted_and_below_the_target() -> None:
    path = RESULTS / "first-eviction-cuda-2026-11-26-h100.jsonl"
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["code"] == "new"]
    assert {row["length"] for row in rows} == set(LENGTHS)
    for row in rows:
        taken = row["rescore_ms"] + row["compact_ms"]
        work = counted(row["length"], DEFAULTS[0])
        assert 1 < taken / work["ms"] < 4
        assert taken / work["prompt"]["ms"] < TARGET


def test_a_line_per_length_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--counted", "2048", "8192"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["length"], row["ranks"]) for row in rows] == [
        (length, ranks) for length in LENGTHS[:2] for ranks in DEFAULTS
    ]
