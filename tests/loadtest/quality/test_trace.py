# SPDX-License-Identifier: Apache-2.0
"""The offline twin of the playground's picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_vllm.blocks.trace import TracedEviction, Traces
from loadtest.quality.trace import draw, growth, held, history, main

LOST = [[[0, 1], [2, 3]], [[1, 5], [0, 3]]]
"""Of two layers with one head, by eviction."""


@pytest.fixture
def trace() -> Any:
    traces = Traces(2, 1)
    traces.follow("a", 12)
    for number, seen in enumerate((6, 8)):
        lost = np.array([[np.isin(np.arange(seen), layer[number])] for layer in LOST])
        traces.note([TracedEviction.of("a", seen, first=number == 0, lost=lost)])
    reports: dict[str, dict[str, object]] = {"a": {"tokens_seen": 9}}
    traces.complete(reports)
    return reports["a"]["trace"]


def test_a_history_is_what_the_engine_noted(trace: Any) -> None:
    number = history(trace)
    assert number.shape == (2, 1, 9)
    for layer, evictions in enumerate(LOST):
        for at, lost in enumerate(evictions, start=1):
            assert np.flatnonzero(number[layer, 0] == at).tolist() == sorted(lost)
    assert held(trace).sum() == 10 and held(trace, 1).sum() == 14 and held(trace, 0).all()
    assert held(trace).sum((0, 1)).tolist() == trace["kept"]


def test_what_is_held_falls_at_each_eviction(trace: Any) -> None:
    assert growth(trace) == [(0, 0), (6, 6), (6, 4), (8, 6), (8, 4), (9, 5)]


def test_a_picture_shows_what_each_layer_holds(trace: Any) -> None:
    heat, each, grown, *_ = draw(trace).axes
    assert heat.images[0].get_array().tolist() == held(trace).mean(1).tolist()
    assert each.get_xlim() == (0, 9)
    assert grown.lines[1].get_xydata().tolist() == [list(point) for point in growth(trace)]


def test_the_command_draws_a_response_and_says_what_is_missing(tmp_path: Path, trace: Any) -> None:
    response, out = tmp_path / "answer.json", tmp_path / "trace.png"
    report = {"policy": "h2o", "budget": 0.5, "tokens_held": 5, "tokens_seen": 9}
    response.write_text(json.dumps({"kv_cache": report | {"trace": trace}}))
    main(["--response", str(response), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    response.write_text(json.dumps({"kv_cache": report}))
    with pytest.raises(SystemExit, match="without kv_trace"):
        main(["--response", str(response)])
