# SPDX-License-Identifier: Apache-2.0
"""Protected tokens on the GPU's adaptors: readers of one prefix, each with its policy, in one batch.

Every attention output is compared with a plain model of its policy, which reads no cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.cuda.fake_gpu import fake_gpu
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model

PREFIX, NEW = 70, 30
PROMPT = [5] * 120
SOME = ("attention", "key", "value+end+key")
"""All queries counted, none, scores adjusted."""
READERS = ("attention", "mean", "value", "key", "end+key", "value+end+key")


def named(policy: str) -> str:
    """A request's name: what is before the plus says its tokens' queries, keys and values."""
    return f"one+{policy.replace('+', '-')}"


def asked_by(policy: str) -> dict[str, Any]:
    return {"kv_budget": 0.4, "kv_policy": policy, "kv_recent": 0.5, "kv_protect": PREFIX}


def expected_outputs(policy: str, block: int) -> list[torch.Tensor]:
    """Of a plain model, which reads no cache."""
    return outputs_of(plain_model(asked_by(policy), len(PROMPT), block), "one", NEW)


@pytest.mark.parametrize(
    ("num_blocks", "pipelined", "base", "readers"),
    [
        pytest.param(120, True, "triton", SOME, id="some-async-triton"),
        pytest.param(120, True, "triton", READERS, id="async-triton", marks=pytest.mark.long),
        pytest.param(14, False, "flash", READERS, id="preempting-flash", marks=pytest.mark.long),
    ],
)
def test_readers_of_one_prefix_keep_what_they_would_alone(
    model_dir: str, num_blocks: int, pipelined: bool, base: str, readers: tuple[str, ...]
) -> None:
    with fake_gpu(model_dir, num_blocks, base, pipelined=pipelined, kv_min_tokens=FLOOR) as (
        rig,
        gpu,
    ):
        for policy in readers:
            rig.add(named(policy), PROMPT, asked_by(policy), max_tokens=NEW)
        rig.add("one+all", PROMPT, {"kv_budget": 0.4, "kv_protect": "prompt"}, max_tokens=NEW)
        rig.add("one+full", PROMPT, None, max_tokens=NEW)
        pinned = -(-PREFIX // rig.block_size) * rig.block_size
        left_out: set[int] = set()
        while rig.scheduler.has_unfinished_requests():
            gpu.worker.execute_model(rig.step())
            pieces = gpu.state.workspace.pieces
            left_out |= {*pieces[pieces[:, 0] >= 0, 8].tolist()}
        # Of pinned tokens, whole tiles take no scratch, in which several rows would have them.
        tile = gpu.state.workspace.tile
        assert left_out == {pinned // tile * tile}
        cached = {name: report["0"]["tokens_cached"] for name, report in rig.reports.items()}
        # One needs no scores: it also reads what its first eviction frees, once others have published it.
        freed = pinned + rig.block_size
        assert cached.pop(named("key")) in (pinned, freed)
        assert {cached[named(one)] for one in readers if one != "key"} == {0, pinned}
        assert bool(rig.preemptions) == (num_blocks == 14)
        for policy in readers:
            for position, output in enumerate(expected_outputs(policy, rig.block_size)):
                name = named(policy), position
                if name not in gpu.outputs:
                    # Read from the cache.
                    assert position < (freed if policy == "key" else pinned)
                    continue
                torch.testing.assert_close(
                    gpu.outputs[name], output, rtol=1e-4, atol=1e-5,
                    msg=lambda text, at=position, who=policy: f"{who} at {at}: {text}",
                )  # fmt: skip
