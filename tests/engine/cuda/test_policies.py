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

from h2o_vllm.engine.cuda.variants import Variant
from tests.calibration.made import calibration_of
from tests.engine.cuda.fake_gpu import FakeGPU, check_outputs, fake_gpu
from tests.engine.cuda.fake_model import KV_HEADS, LAYERS, SCALE, SIZE, module_of, qkv
from tests.engine.scheduling import Rig
from tests.engine.test_policies import model_of
from tests.reference.policies import PolicyModel
from tests.served import SERVED, policy_of

FLOOR = 32
SLOW, LONG = pytest.mark.slow, pytest.mark.long
ON_GPUS = list(SERVED)
MOVING = [name for name in ON_GPUS if policy_of(name).moves_tokens and name != "random"] + [
    "attention+value+key",
    "mean+end",
]
"""Which tokens ``random`` draws: ``tests/policy/test_ranks.py``."""
FULL = {"kv_budget": 1.0, "kv_policy": "attention", "kv_recent": 0.5}
REQUESTS: dict[str, tuple[int, int, dict[str, Any] | None]] = (
    {"full": (90, 40, None)}
    | {
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
    }
    | {
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
    | {
        "cut": (
            150,
            20,
            {
                "kv_budget": 0.3,
                "kv_policy": "value+end+key",
                "kv_recent": 0.5,
                "kv_evict_from": 101,
            },
        )
    }
)
"""Prompts are cut into chunks of at most 64 tokens, and where depends on the others."""


def plain_model(asked: dict[str, Any], prompt: int, block: int) -> PolicyModel:
    """Of what a request asks for; pages and shares nothing."""
    nothing: Any = None
    model = model_of(nothing, asked, block=block, floor=FLOOR)
    model.prompt, model.calibration = prompt, calibration_of(LAYERS, KV_HEADS, SIZE).weights
    return model


def outputs_of(
    model: PolicyModel, name: str, new: int, readers: int = 0, *, fp8: bool = False, **softmax: Any
) -> list[torch.Tensor]:
    """Attention of every computed token of one request, one by one. [LAYERS + readers, HEADS, SIZE] each."""
    outputs = []
    # The last token is sampled, never computed.
    for position in range(model.prompt + new - 1):
        model._evict(position)
        layers = []
        for layer in range(LAYERS + readers):
            q, k, v = (t[None, :, None] for t in qkv(name, position, layer, fp8))
            layers.append(
                model.attend(module_of(layer, readers), q, k, v, SCALE, **softmax)[0][0, 0]
            )
        outputs.append(torch.stack(layers))
    assert len(model.ranked) > (model.block == 16) or model.fraction == 1
    return outputs


def run(rig: Rig, gpu: FakeGPU, names: Collection[str]) -> None:
    for count, name in enumerate(names):
        prompt, new, asked = REQUESTS[name]
        rig.add(name, [2 + count] * prompt, asked, max_tokens=new)
    for _ in range(2000):
        if not rig.scheduler.has_unfinished_requests():
            return
        gpu.worker.execute_model(rig.step())
    raise AssertionError("not done")


@pytest.mark.parametrize(
    ("every", "num_blocks", "pipelined", "base", "readers", "kv_dtype"),
    [
        pytest.param(3, 15, False, "flash", 0, "auto", id="some-preempting-flash"),
        pytest.param(5, 120, True, "flash", 0, "fp8", id="some-flash-fp8"),
        pytest.param(4, 120, True, "triton", 2, "auto", id="read-by-others", marks=SLOW),
        pytest.param(1, 24, False, "flash", 0, "auto", id="preempting-flash", marks=LONG),
        pytest.param(1, 120, True, "triton", 0, "fp8", id="async-triton-fp8", marks=LONG),
    ],
)
def test_attention_equals_a_plain_model_of_each_policy(
    model_dir: str,
    every: int,
    num_blocks: int,
    pipelined: bool,
    base: str,
    readers: int,
    kv_dtype: str,
) -> None:
    """Also if nothing is evicted, and with KV in 8 bits, of one that computes with what these stand for.

    Args:
        every: of the requests each n-th. readers: layers that read the KV of the last one.
    """
    fp8, expected = kv_dtype == "fp8", {}
    for name in ["full", *list(REQUESTS)[1::every]]:
        prompt, new, asked = REQUESTS[name]
        # What follows a cut is computed as an answer would be.
        context = (asked or FULL).get("kv_evict_from", prompt)
        model = plain_model(asked or FULL, context, 16)
        expected[name] = outputs_of(model, name, new + prompt - context, readers, fp8=fp8)
    with fake_gpu(
        model_dir, num_blocks, base, kv_dtype, pipelined=pipelined, kv_min_tokens=FLOOR, caching=False,
        readers=readers,
    ) as (rig, gpu):  # fmt: skip
        assert rig.block_size == 16
        run(rig, gpu, expected)
        for name, outputs in expected.items():
            check_outputs(gpu, name, outputs)
        assert {eviction.request_id for eviction in rig.evictions} == {*expected} - {"full"}
        assert bool(rig.preemptions) == (not pipelined)
        assert gpu.replays[Variant.MIXED]
