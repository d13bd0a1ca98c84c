# SPDX-License-Identifier: Apache-2.0
"""Figures are exact, and what is written is what is read."""

import pytest

from loadtest.http.records import ALL, Record, summarise


def record(label: str = "kv=0.2", at: float = 0.0, **changes: object) -> Record:
    values = {"ttft": 0.5, "latency": 2.5, "gaps_ms": [1000.0, 1000.0], "output_tokens": 3}
    return Record(label, at, **(values | changes))


def test_speed_of_a_budget_is_its_share_of_the_whole_run() -> None:
    records = [record(), record("kv=1", 2.5, output_tokens=7)]
    got = summarise(records)
    assert list(got) == [ALL, "kv=0.2", "kv=1"]
    assert got[ALL].seconds == 5.0
    speeds = {label: summary.tok_per_s for label, summary in got.items()}
    assert speeds == pytest.approx({ALL: 2.0, "kv=0.2": 0.6, "kv=1": 1.4})


def test_failed_and_cut_requests_give_no_latencies_and_only_the_failed_are_errors() -> None:
    records = [record(), record(error="500", ttft=9.0), record(cut=True, ttft=9.0)]
    got = summarise(records)[ALL]
    assert (got.requests, got.failures, got.cut) == (3, 1, 1)
    assert got.error_rate == 0.5
    assert got.samples["ttft"] == [0.5]
    assert got.samples["itl"] == [1.0, 1.0]
    # But tokens that came did come.
    assert got.output_tokens == 9


def test_time_per_output_token_counts_tokens_not_events() -> None:
    assert record(output_tokens=5).tpot == 0.5
    assert record(output_tokens=1, gaps_ms=[]).tpot is None
