# SPDX-License-Identifier: Apache-2.0
"""Law 11 on GPUs without one: ranks that share a model's heads do what one rank does with all of them."""

from __future__ import annotations

import pytest
import torch

from tests.engine.cuda.fake_gpu import HEADS, KV_HEADS, LAYERS, SIZE, FakeGPU, fake_gpu
from tests.kernels.triton.rescore_laws import calibration_of

FLOOR = 32


@pytest.mark.parametrize(
    "policy",
    [
        "h2o",
        "predicted+key",
        *(pytest.param(policy, marks=pytest.mark.long) for policy in ("random", "key")),
    ],
)
def test_law11_two_ranks_hold_what_one_holds_and_say_the_same(model_dir: str, policy: str) -> None:
    # What ranks have to add up: tests/kernels/triton/test_predict.py.
    calibration = calibration_of(LAYERS, KV_HEADS, SIZE, own=True)
    asked = {"kv_budget": 0.4, "kv_policy": policy, "kv_protect": 0, "kv_heads": "equal"}
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gpu(model_dir, 40, kv_min_tokens=FLOOR, caching=False, calibration=calibration) as (
            rig,
            whole,
        ),
    ):
        ranks = [
            FakeGPU(rig, 40, patch, "flash", kv_heads=range(i, i + 1), calibration=calibration)
            for i in range(KV_HEADS)
        ]
        # Ranks have fewer heads: forms of their own.
        whole.compiled = whole.compiled.union(*(rank.compiled for rank in ranks))
        rig.add("one", [1] * 110, asked, max_tokens=30)
        rig.add("two", [2] * 70, None, max_tokens=20)
        rig.add("three", [3] * 60, asked, max_tokens=40)
        while rig.scheduler.has_unfinished_requests():
            # One plan, made from counts, for all ranks.
            plan = rig.step()
            for gpu in (whole, *ranks):
                gpu.worker.execute_model(plan)
            for rank in ranks:
                assert torch.equal(rank.runner.table.gpu, whole.runner.table.gpu)
        assert {one.request_id for one in rig.evictions} == {"one", "three"}
        for token, output in whole.outputs.items():
            shares = torch.cat([rank.outputs[token] for rank in ranks], dim=1)
            assert shares.shape[1] == HEADS
            torch.testing.assert_close(shares, output, rtol=1e-4, atol=1e-5)
        # Each rank's heads went their own way, but as one rank's would.
        scores = torch.cat([rank.state.scores for rank in ranks], dim=2)
        torch.testing.assert_close(scores, whole.state.scores, rtol=1e-4, atol=1e-4)
