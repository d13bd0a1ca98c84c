# SPDX-License-Identifier: Apache-2.0
"""What a trace says of a request's evictions."""

from typing import Any

import numpy as np
import pytest

from h2o_vllm.blocks.counts.trace import TracedEviction, Traces, check_traceable
from h2o_vllm.config.request_fields import MAX_TRACE_TOKENS
from h2o_vllm.errors import BudgetError


def eviction(seen: int, lost: list[list[list[int]]], *, first: bool = False) -> TracedEviction:
    """``lost``: positions, of each layer and head."""
    places = enumerate(lost)
    gone = [(i, j, at) for i, layer in places for j, head in enumerate(layer) for at in head]
    return TracedEviction("a", seen, first, np.array(gone, dtype=np.uint16).T)


def traced(*evictions: TracedEviction, seen: int = 8) -> Any:
    """Of two layers with one head each."""
    traces = Traces(2, 1)
    traces.follow("a", 10)
    for one in evictions:
        traces.note([one])
    reports: dict[str, dict[str, object]] = {"a": {"tokens_seen": seen}, "b": {"tokens_seen": 3}}
    traces.complete(reports)
    assert "trace" not in reports["b"]
    return reports["a"]["trace"]


def test_each_position_says_with_which_eviction_it_went() -> None:
    trace = traced(eviction(6, [[[0, 1]], [[1, 3]]], first=True), eviction(7, [[[4, 2]], [[0, 2]]]))
    assert trace == {
        "layers": 2,
        "kv_heads": 1,
        "evicted_at": [6, 7],
        "kept": [0, 0, 0, 1, 1, 2, 2, 2],
        "lost": [[[1, 2, 2, 1, 0, 1, 2, 1, 0, 3]], [[2, 1, 1, 1, 2, 1, 1, 1, 0, 4]]],
    }


def test_heads_may_lose_different_numbers() -> None:
    trace = traced(eviction(6, [[[0, 1, 5]], [[3]]], first=True), eviction(8, [[[]], [[0, 2]]]))
    assert trace["kept"] == [0, 1, 1, 1, 2, 1, 2, 2]
    assert trace["lost"] == [[[1, 2, 0, 3, 1, 1, 0, 2]], [[2, 1, 0, 1, 2, 1, 1, 1, 0, 4]]]


def test_without_evictions_everything_is_held() -> None:
    trace = traced()
    assert trace["evicted_at"] == [] and trace["kept"] == [2] * 8
    assert trace["lost"] == [[[0, 8]], [[0, 8]]]


def test_a_preempted_request_begins_anew() -> None:
    again = eviction(6, [[[0, 1]], [[1, 3]]], first=True)
    stale = eviction(7, [[[4, 2]], [[0, 2]]])
    assert traced(again, stale, again) == traced(again)


def test_what_comes_after_the_end_is_for_nobody() -> None:
    traces = Traces(2, 1)
    traces.note([eviction(6, [[[0, 1]], [[1, 3]]], first=True)])
    reports: dict[str, dict[str, object]] = {"a": {"tokens_seen": 7}}
    traces.complete(reports)
    assert reports == {"a": {"tokens_seen": 7}}


def test_only_what_one_can_look_at_is_traced() -> None:
    check_traceable(MAX_TRACE_TOKENS, stops=False)
    with pytest.raises(BudgetError, match=r"more than 4096 tokens .* are 4097"):
        check_traceable(MAX_TRACE_TOKENS + 1, stops=False)
    with pytest.raises(BudgetError, match="stop strings"):
        check_traceable(1, stops=True)
