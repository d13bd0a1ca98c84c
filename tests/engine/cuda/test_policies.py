# SPDX-License-Identifier: Apache-2.0
"""Every policy through scheduler, worker, builder and attention, without a GPU.

Every attention output is compared with ``tests.reference.policies``: a token kept or scored
otherwise shows in all later ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from tests.engine.cuda.fake_gpu import (
    KV_HEADS,
    LAYERS,
    SCALE,
    SIZE,
    FakeGPU,
    fake_gpu,
    module_of,
    qkv,
)  # fmt: skip
from tests.engine.scheduling import Rig
from tests.kernels.triton.rescore_laws import calibration_of
from tests.reference.policies import PolicyModel
from tests.served import SERVED, policy_of

FLOOR = 32
ON_GPUS = [name for name in SERVED if not policy_of(name).without_op]
MOVING = [name for name in ON_GPUS if policy_of(name).moves_tokens and name != "random"] + [
    "attention+value+key",
    "mean+end",
]
"""Which tokens ``random`` draws: ``tests/kernels/triton/test_rescore.py``."""
REQUESTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    f"{policy}-{protect}": (
        70 + 11 * row,
        40,
        {
            "kv_budget": 0.4,
            "kv_policy": policy,
            "kv_protect": protect,
            "kv_recent": recent,
            "kv_heads": "equal",
        },
    )
    for row, (policy, protect, recent) in enumerate(
        [*[(policy, 0, 0.5) for policy in MOVING], ("attention", 20, 1.0), ("end", 3, 0.0)]
    )
} | {
    f"{policy}-bounded": (
        150,
        20,
        {"kv_budget": budget, "kv_policy": policy, "kv_prefill_tokens": 64, "kv_recent": 0.5},
    )
    for policy, budget in (
        ("attention", 0.2),
        ("mean", 1.0),
        ("key", 0.2),
        ("value+end+key", 0.2),
    )
}
"""Prompts are cut into chunks of at most 64 tokens, and where depends on the others."""


def expected_outputs(name: str, block: int, readers: int) -> list[torch.Tensor]:
    """Of a plain model of the request's policy."""
    prompt, new, asked = REQUESTS[name]
    return outputs_of(plain_model(asked, prompt, block), name, new, readers)


def plain_model(asked: dict[str, Any], prompt: int, block: int) -> PolicyModel:
    """Of what a request asks for; pages and shares nothing."""
    nothing: Any = None
    return PolicyModel(
        nothing,
        asked["kv_policy"],
        asked["kv_budget"],
        asked["kv_recent"],
        block,
        FLOOR,
        protected=asked.get("kv_protect", 0),
        delay=asked.get("kv_delay", 0),
        bound=asked.get("kv_prefill_tokens", 0),
        shared=asked.get("kv_heads") == "shared",
        prompt=prompt,
        calibration=calibration_of(LAYERS, KV_HEADS, SIZE).weights,
    )


def outputs_of(model: PolicyModel, name: str, new: int, readers: int = 0) -> list[torch.Tensor]:
    """Attention of every computed token of one request, one by one. [LAYERS + readers, HEADS, SIZE] each."""
    outputs = []
    # The last token is sampled, never computed.
    for position in range(model.prompt + new - 1):
        model._evict(position)
        layers = []
        for layer in range(LAYERS + readers):
            q, k, v = (t[None, :, None] for t in qkv(name, position, layer))
            layers.append(model.attend(module_of(layer, readers), q, k, v, SCALE)[0][0, 0])
        outputs.append(torch.stack(layers))
    assert len(model.ranked) > 1
    return outputs


def run(rig: Rig, gpu: FakeGPU, names: Collection[str]) -> None:
    rig.add("full", [2] * 90, None, max_tokens=40)
    for count, name in enumerate(names):
        prompt, new, asked = REQUESTS[name]
        rig.add(name, [3 + count] * prompt, asked, max_tokens=new)
    for _ in range(2000):
        if not rig.scheduler.has_unfinished_requests():
            return
        gpu.worker.execute_model(rig.step())
    raise AssertionError("not done")


@pytest.mark.parametrize(
    ("every", "num_blocks", "pipelined", "base", "readers"),
    [
        pytest.param(3, 15, False, "flash", 0, id="some-preempting-flash"),
        pytest.param(4, 120, True, "triton", 2, id="read-by-others", marks=pytest.mark.slow),
        pytest.param(1, 24, False, "flash", 0, id="preempting-flash", marks=pytest.mark.long),
        pytest.param(1, 120, True, "triton", 0, id="async-triton", marks=pytest.mark.long),
    ],
)
def test_attention_equals_a_plain_model_of_each_policy(
    model_dir: str, every: int, num_blocks: int, pipelined: bool, base: str, readers: int
) -> None:
    """``every``: of the requests each n-th; ``readers``: layers that read the KV of the last one."""
    expected = {name: expected_outputs(name, 16, readers) for name in list(REQUESTS)[::every]}
    with fake_gpu(
        model_dir, num_blocks, base, pipelined=pipelined, kv_min_tokens=FLOOR, caching=False,
        readers=readers,
    ) as (rig, gpu):  # fmt: skip
        assert rig.block_size == 16
        run(rig, gpu, expected)
        for name, outputs in expected.items():
            for position, output in enumerate(outputs):
                torch.testing.assert_close(
                    gpu.outputs[name, position], output, rtol=1e-4, atol=1e-5,
                    msg=lambda text, at=position, who=name: f"{who} at {at}: {text}",
                )  # fmt: skip
        assert {eviction.request_id for eviction in rig.evictions} == set(expected)
        assert bool(rig.preemptions) == (not pipelined)
