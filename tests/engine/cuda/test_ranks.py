# SPDX-License-Identifier: Apache-2.0
"""Law 11 on GPUs without one: workers that share a model do what one worker does with all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.calibration.made import calibration_of
from tests.engine.cuda.fake_gpu import FakeGPU, fake_gpu
from tests.engine.cuda.fake_model import HEADS, KV_HEADS, LAYERS, SIZE

FLOOR = 32

RANKS = [{"kv_heads": range(i, i + 1)} for i in range(KV_HEADS)]
"""Of tensor parallelism, a KV head and its q heads each."""
STAGES = [{"layers": range(i, i + 1)} for i in range(LAYERS)]
"""Of a pipeline, a layer each."""
COPIES = [
    {"kv_heads": range(i * KV_HEADS // HEADS, i * KV_HEADS // HEADS + 1), "q_heads": range(i, i + 1)}
    for i in range(HEADS)
]  # fmt: skip
"""More ranks than KV heads: a q head each, and a copy of its KV head."""


def run(model_dir: str, workers: list[dict[str, Any]], asked: dict[str, Any]) -> None:
    """One plan, made from counts, for all workers; tables, attention and scores are those of one."""
    # What ranks have to add up: tests/engine/test_rescoring.py.
    calibration = calibration_of(LAYERS, KV_HEADS, SIZE, own=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gpu(model_dir, 40, kv_min_tokens=FLOOR, caching=False, calibration=calibration) as (
            rig,
            whole,
        ),
    ):
        parts = [
            FakeGPU(rig, 40, patch, "flash", calibration=calibration, **one) for one in workers
        ]
        # Parts have other sizes: forms of their own.
        whole.compiled = whole.compiled.union(*(part.compiled for part in parts))
        rig.add("one", [1] * 90, asked, max_tokens=20)
        rig.add("two", [2] * 40, None, max_tokens=10)
        rig.add("three", [3] * 50, asked, max_tokens=30)
        while rig.scheduler.has_unfinished_requests():
            plan = rig.step()
            for gpu in (whole, *parts):
                gpu.worker.execute_model(plan)
            for part in parts:
                assert torch.equal(part.runner.tables[0].gpu, whole.runner.tables[0].gpu)
        assert {one.request_id for one in rig.evictions} == {"one", "three"}
        for part in parts:
            own = slice(part.layers.start, part.layers.stop)
            mine = slice(part.q_heads.start, part.q_heads.stop)
            assert part.outputs.keys() == whole.outputs.keys()
            for token, output in part.outputs.items():
                want = whole.outputs[token][own, mine]
                torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
            # Each head went its own way, but as with one worker.
            held = slice(part.kv_heads.start, part.kv_heads.stop)
            want = whole.state.scores[own, :, held]
            torch.testing.assert_close(part.state.scores, want, rtol=1e-4, atol=1e-4)


def asked(policy: str, **more: Any) -> dict[str, Any]:
    return {"kv_budget": 0.4, "kv_policy": policy, "kv_protect": 0, "kv_heads": "equal", **more}


@pytest.mark.parametrize(
    "policy",
    [
        "h2o",
        "predicted+key",
        *(pytest.param(policy, marks=pytest.mark.long) for policy in ("random", "key")),
    ],
)
def test_law11_two_ranks_hold_what_one_holds_and_say_the_same(model_dir: str, policy: str) -> None:
    run(model_dir, RANKS, asked(policy))


@pytest.mark.parametrize(
    ("policy", "heads"),
    [
        ("random", "equal"),
        pytest.param("predicted+attention", "shared", marks=pytest.mark.long),
        pytest.param("predicted+key", "equal", marks=pytest.mark.long),
        pytest.param("h2o", "equal", marks=pytest.mark.long),
    ],
)
def test_law11_two_stages_hold_what_one_holds(model_dir: str, policy: str, heads: str) -> None:
    run(model_dir, STAGES, asked(policy, kv_heads=heads))


@pytest.mark.parametrize(
    "policy",
    [
        "random",
        *(
            pytest.param(policy, marks=pytest.mark.long)
            for policy in ("predicted+key", "key", "window")
        ),
    ],
)
def test_law11_ranks_with_copies_of_a_head_hold_the_same(model_dir: str, policy: str) -> None:
    run(model_dir, COPIES, asked(policy))
