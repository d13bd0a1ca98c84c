# SPDX-License-Identifier: Apache-2.0
"""Elastic requests on the GPU's adaptors: every attention output is that of the replay alone.

Names share the text before the plus, and with it every token's query, key and value.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.cuda.fake_gpu import check_outputs, fake_gpu

FLOOR, NEW = 32, 40
LENGTH = 100
POLICIES = ("attention", "key", "mean", "window")


def asked_by(policy: str, **begin: Any) -> dict[str, Any]:
    return {"kv_budget": 0.3, "kv_policy": policy, **begin}


@pytest.mark.parametrize(
    ("pipelined", "base"),
    [
        pytest.param(True, "triton", marks=pytest.mark.slow),
        pytest.param(False, "flash", marks=pytest.mark.long),
    ],
    ids=["async-triton", "sync-flash"],
)
def test_law05_squeezed_rows_attend_like_their_replays(
    model_dir: str, pipelined: bool, base: str
) -> None:
    """One is squeezed in a step that computes nothing of it: its row is not in the batch."""
    options: dict[str, Any] = {"pipelined": pipelined, "kv_min_tokens": FLOOR}
    options["max_num_batched_tokens"] = 512
    with fake_gpu(model_dir, 40, base, **options) as (rig, gpu):
        limit_chunk, held = rig.scheduler.limit_chunk, set()

        def limiting(request: Any, computed: int, num_tokens: int) -> int:
            return 0 if request.request_id in held else limit_chunk(request, computed, num_tokens)

        rig.scheduler.limit_chunk = limiting  # type: ignore[method-assign]
        for number, policy in enumerate(POLICIES):
            asked = asked_by(policy, kv_elastic=True)
            rig.add(f"{policy}+elastic", [11 + number] * LENGTH, asked, max_tokens=NEW)
        for count in range(1000):
            if count == 6:
                # More than half of the pool, for which three have to yield; one of them is not in the step.
                rig.add("crowd", [7] * 400, None, max_tokens=2)
                held = {"mean+elastic"}
            if not rig.scheduler.has_unfinished_requests():
                break
            output = rig.step()
            gpu.worker.execute_model(output)
            if count == 6:
                assert "mean+elastic" in {e.request_id for e in output.h2o.evictions}
                assert "mean+elastic" not in output.num_scheduled_tokens
                held = set()
        points = {policy: rig.report(f"{policy}+elastic")["squeezed_at"] for policy in POLICIES}
        assert sum(at is not None for at in points.values()) >= 2
        found = {key: value for key, value in gpu.outputs.items() if "+elastic" in key[0]}
    with fake_gpu(model_dir, 120, base, **options) as (rig, gpu):
        for number, (policy, at) in enumerate(points.items()):
            begin = {"kv_elastic": True} if at is None else {"kv_evict_from": at}
            asked = asked_by(policy, **begin)
            rig.add(f"{policy}+alone", [11 + number] * LENGTH, asked, max_tokens=NEW)
            while rig.scheduler.has_unfinished_requests():
                gpu.worker.execute_model(rig.step())
        for policy in POLICIES:
            ones = [found[f"{policy}+elastic", at] for at in range(LENGTH + NEW - 1)]
            check_outputs(gpu, f"{policy}+alone", ones)
