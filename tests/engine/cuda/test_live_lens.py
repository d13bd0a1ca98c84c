# SPDX-License-Identifier: Apache-2.0
"""Splitting scores is launched for the tokens that live, not for those that were seen."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_vllm.kernels import triton as kernels
from tests.engine.cuda.fake_gpu import fake_gpu

ASKED = {"kv_budget": 0.25, "kv_policy": "value+end+key"}


@pytest.mark.parametrize(
    "num_blocks", [pytest.param(80, marks=pytest.mark.long), 16], ids=["ample", "preempting"]
)
def test_the_grid_is_as_long_as_the_longest_live_row(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """Slots of the request table are used again, after a preemption and by other requests."""
    split = kernels.split_scores
    launched: list[int] = []

    def counting(scores: Any, early: Any, table: Any, live: Any, rows: Any, max_len: int) -> None:
        assert max_len == live[rows.long()].max()
        launched.append(max_len)
        split(scores, early, table, live, rows, max_len)

    monkeypatch.setattr(kernels, "split_scores", counting)
    with fake_gpu(model_dir, num_blocks, kv_min_tokens=32, caching=False) as (rig, gpu):
        rig.add("one", [1] * 180, ASKED, max_tokens=40)
        rig.add("bounded", [2] * 200, {**ASKED, "kv_prefill_tokens": 64}, max_tokens=30)
        rig.add("full", [3] * 70, max_tokens=60)
        for count in range(1000):
            if count == 30:
                rig.add("next", [4] * 100, ASKED, max_tokens=20)
            if not rig.scheduler.has_unfinished_requests():
                break
            gpu.worker.execute_model(rig.step())
        assert bool(rig.preemptions) == (num_blocks == 16)
    # While no request has seen fewer than 100 tokens.
    assert min(launched) < 70
