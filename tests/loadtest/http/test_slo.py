# SPDX-License-Identifier: Apache-2.0
"""The gate: what it reads, and that it never passes what was not measured."""

import pytest

from loadtest.http.records import Record, summarise
from loadtest.http.slo import check, parse_slo

RECORDS = [
    Record("kv=0.2", 0.0, ttft=0.1 * i, latency=1.0, gaps_ms=[10.0], output_tokens=2)
    for i in range(1, 11)
] + [Record("kv=1", 0.0, ttft=5.0, latency=8.0, error="500")]


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft_p50=0.55", True),
        ("ttft_p50=0.54", False),
        ("ttft_mean=0.5499", False),
        ("latency_p50=0.9", False),
        ("tok_per_s=2.5", True),
        ("tok_per_s=2.6", False),
        ("error_rate=0.1", True),
        ("req_per_s=1.25", True),
        ("ttft_p50[kv=0.5]=100", False),
        ("error_rate[kv=0.5]=1", False),
    ],
)
def test_objective(text: str, met: bool) -> None:
    (result,) = check(parse_slo(text), summarise(RECORDS))
    assert result.met is met


def test_run_without_requests_meets_nothing() -> None:
    text = "ttft_p50=1,error_rate=1,tok_per_s=0"
    assert [result.met for result in check(parse_slo(text), summarise([]))] == [False] * 3
