# SPDX-License-Identifier: Apache-2.0
"""Batches in which some evict and nobody is scored: no kernel of ours, where a server is for such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_vllm.engine.cuda.variants import Variant
from h2o_vllm.kernels import triton as kernels
from tests.engine.cuda.fake_gpu import check_outputs, fake_gpu
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model

PROMPT, NEW = 70, 24
BUDGET: dict[str, Any] = {"kv_budget": 0.4, "kv_recent": 0.5}


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    model = plain_model({"kv_policy": "key", **BUDGET}, PROMPT, 16)
    return outputs_of(model, "key", NEW)


@pytest.mark.parametrize(
    ("default", "graph"), [("key", Variant.HOLES), ("h2o", Variant.MIXED)], ids=["key", "h2o"]
)
def test_a_graph_without_our_kernels_serves_whom_nobody_scores(
    model_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[torch.Tensor],
    default: str,
    graph: Variant,
) -> None:
    ours: list[bool] = []
    attend = kernels.attend_decode

    def noted(*args: Any, **kwargs: Any) -> None:
        ours.append(True)
        attend(*args, **kwargs)

    monkeypatch.setattr(kernels, "attend_decode", noted)
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR, caching=False, kv_policy=default) as (
        rig,
        gpu,
    ):
        assert rig.block_size == 16
        for number, (name, policy) in enumerate((("key", "key"), ("window", "window"))):
            asked = BUDGET | {"kv_policy": policy}
            rig.add(name, [3 + number] * PROMPT, asked, max_tokens=NEW)
        rig.add("full", [2] * 20, None, max_tokens=NEW)
        while rig.scheduler.has_unfinished_requests():
            gpu.worker.execute_model(rig.step())
        check_outputs(gpu, "key", expected)
        assert gpu.replays[graph] > 15
        assert {variant for variant in Variant if gpu.replays[variant]} <= {graph, Variant.STOCK}
        assert bool(ours) == (graph is Variant.MIXED)
        assert {eviction.request_id for eviction in rig.evictions} == {"key", "window"}
