# SPDX-License-Identifier: Apache-2.0
"""Batches in which some evict and nobody is scored: no kernel of ours, where a server is for such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_vllm.engine.cuda.variants import Variant
from h2o_vllm.kernels import triton as kernels
from tests.engine.cuda.fake_gpu import fake_gpu
from tests.engine.cuda.test_policies import FLOOR, REQUESTS, expected_outputs


@pytest.mark.parametrize(
    ("default", "graph"),
    [("keydiff", Variant.HOLES), ("window", Variant.HOLES), ("h2o", Variant.MIXED)],
    ids=["keydiff", "window", "h2o"],
)
def test_a_graph_without_our_kernels_serves_whom_nobody_scores(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, default: str, graph: Variant
) -> None:
    ours: list[bool] = []
    attend = kernels.attend_decode

    def noted(*args: Any) -> None:
        ours.append(True)
        attend(*args)

    monkeypatch.setattr(kernels, "attend_decode", noted)
    name = "keydiff-0"
    prompt, new, asked = REQUESTS[name]
    with fake_gpu(model_dir, 60, kv_min_tokens=FLOOR, caching=False, kv_policy=default) as (
        rig,
        gpu,
    ):
        rig.add(name, [3] * prompt, asked, max_tokens=new)
        rig.add("window", [4] * 90, {"kv_budget": 0.4, "kv_policy": "window"}, max_tokens=new)
        rig.add("full", [2] * 50, None, max_tokens=new)
        while rig.scheduler.has_unfinished_requests():
            gpu.worker.execute_model(rig.step())
        for position, output in enumerate(expected_outputs(name, rig.block_size)):
            torch.testing.assert_close(gpu.outputs[name, position], output, rtol=1e-4, atol=1e-5)
        assert gpu.replays[graph] > 30
        assert set(gpu.replays) - {v for v in Variant if not gpu.replays[v]} <= {
            graph,
            Variant.STOCK,
        }
        assert bool(ours) == (graph is Variant.MIXED)
        assert {eviction.request_id for eviction in rig.evictions} == {name, "window"}
