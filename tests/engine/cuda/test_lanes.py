# SPDX-License-Identifier: Apache-2.0
"""``kv_heads`` "shared" through scheduler, worker, builder and attention, without a GPU.

Every attention output is compared with a plain model of the policy whose heads share what they keep: a lane
given to another head, or read as another's, shows in all later outputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_vllm.engine.cuda.variants import Variant
from tests.engine.cuda.fake_gpu import FakeGPU, check_outputs, fake_gpu
from tests.engine.cuda.fake_model import KV_HEADS, LAYERS, UNEVEN
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model
from tests.engine.scheduling import Rig

SHARED = {"kv_heads": "shared", "kv_budget": 0.4, "kv_recent": 0.25}
REQUESTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    f"{UNEVEN}-{name}": (prompt, new, {**SHARED, **asked})
    for name, prompt, new, asked in (
        ("attention", 90, 40, {"kv_policy": "attention"}),
        ("end", 75, 40, {"kv_policy": "end", "kv_protect": 5}),
        ("value", 130, 40, {"kv_policy": "value", "kv_protect": 33, "kv_delay": 3}),
        ("mean", 125, 40, {"kv_policy": "mean"}),
        (
            "three-ends",
            170,
            60,
            {"kv_policy": "value+end+key", "kv_protect": "ends", "kv_budget": 0.6},
        ),
        # Its heavy blocks lie before the protected end, then there are none, then they lie behind it.
        ("mean-behind", 140, 200, {"kv_policy": "mean", "kv_protect": "ends", "kv_recent": 0.8}),
        ("three", 117, 40, {"kv_policy": "value+end+key"}),
        ("predicted", 117, 40, {"kv_policy": "predicted+value+end+key"}),
        (
            "attention-bounded",
            150,
            30,
            {"kv_policy": "attention", "kv_prefill_tokens": 64, "kv_protect": 20},
        ),
        ("mean-bounded", 150, 20, {"kv_policy": "mean", "kv_prefill_tokens": 64}),
        ("three-bounded", 150, 20, {"kv_policy": "value+end+key", "kv_prefill_tokens": 64}),
    )
}
QUICK = [f"{UNEVEN}-{name}" for name in ("attention", "three-bounded")]
ENDS = [f"{UNEVEN}-three-ends", f"{UNEVEN}-mean-behind"]
SOME = [*QUICK, f"{UNEVEN}-value", f"{UNEVEN}-predicted"]


def expected_outputs(name: str, block: int, readers: int) -> list[torch.Tensor]:
    prompt, new, asked = REQUESTS[name]
    return outputs_of(plain_model(asked, prompt, block), name, new, readers)


def run(rig: Rig, gpu: FakeGPU, names: list[str], *, preempt: bool) -> set[str]:
    """All at once, beside one that loses nothing and one whose heads are equal; who had uneven heads.

    Args:
        preempt: everybody, once, when all of these hold lanes: what they had generated comes in chunks then.
    """
    rig.add("full", [2] * 60, None, max_tokens=30)
    rig.add("equal", [9] * 90, {"kv_budget": 0.4, "kv_policy": "h2o"}, max_tokens=40)
    for count, name in enumerate(names):
        prompt, new, asked = REQUESTS[name]
        rig.add(name, [3 + count] * prompt, asked, max_tokens=new)
    uneven: set[str] = set()
    for _ in range(2000):
        if not rig.scheduler.has_unfinished_requests():
            assert not preempt
            return uneven
        if preempt and gpu.state._heavy_blocks.keys() == set(names):
            preempt = False
            rig.settle()
            assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        gpu.worker.execute_model(rig.step())
        uneven |= {name for name in gpu.state._heavy_blocks if is_uneven(gpu, name)}
    raise AssertionError("not done")


def is_uneven(gpu: FakeGPU, name: str) -> bool:
    assert gpu.state.lanes is not None
    counts = gpu.state.lanes.offsets[:, gpu.state.request_slots[name]].diff()
    assert counts.sum(1).tolist() == [len(gpu.state._heavy_blocks[name]) * KV_HEADS] * LAYERS
    return bool((counts != counts[:, :1]).any())


def shared_chunks(rig: Rig, gpu: FakeGPU) -> set[str]:
    """Fills with where chunks came from whose heads share slots: from a prompt, or from an answer."""
    found: set[str] = set()
    stock = gpu.builder._shared

    def shared(live: Any, rows: Any, blocks: Any) -> Any:
        for row in ((blocks > 0) & (rows.query_lens > 1)).nonzero()[0]:
            names = {slot: name for name, slot in gpu.state.request_slots.items()}
            request = rig.scheduler.requests[names[gpu.state._slots[row]]]
            inside = rows.seq_lens[row] <= request.num_prompt_tokens
            found.add("prompt" if inside else "answer")
        return stock(live, rows, blocks)

    gpu.builder._shared = shared
    return found


@pytest.mark.parametrize(
    ("preempt", "pipelined", "base", "names", "readers"),
    [
        pytest.param(True, False, "flash", QUICK, 0, id="preempted-flash"),
        pytest.param(False, False, "flash", ENDS, 0, id="ends"),
        pytest.param(False, True, "triton", SOME, 0, id="async-triton", marks=pytest.mark.slow),
        pytest.param(False, False, "flash", QUICK, 2, id="read-by-others", marks=pytest.mark.slow),
        pytest.param(False, False, "flash", [*REQUESTS], 0, id="all", marks=pytest.mark.long),
        pytest.param(True, True, "triton", SOME, 0, id="preempted-triton", marks=pytest.mark.long),
    ],
)
def test_law04_attention_equals_a_plain_model_whose_heads_share(
    model_dir: str, preempt: bool, pipelined: bool, base: str, names: list[str], readers: int
) -> None:
    """``readers``: layers that read the KV of the last one, by the lanes of that one."""
    with fake_gpu(
        model_dir, 120, base, pipelined=pipelined, kv_min_tokens=FLOOR, caching=False,
        readers=readers,
    ) as (rig, gpu):  # fmt: skip
        chunks = shared_chunks(rig, gpu)
        uneven = run(rig, gpu, names, preempt=preempt)
        assert uneven == set(names)
        # Of bounded prompts, and of what was generated before a preemption.
        assert "bounded" not in "".join(names) or "prompt" in chunks
        assert not preempt or "answer" in chunks
        for name in names:
            check_outputs(gpu, name, expected_outputs(name, rig.block_size, readers))
        assert gpu.replays[Variant.SHARED]
        # Who has ended is told with the next step.
        rig.add("after", [2] * 5, None, max_tokens=2)
        while rig.scheduler.has_unfinished_requests():
            gpu.worker.execute_model(rig.step())
        assert not gpu.state._heavy_blocks and not gpu.state._sharing
        rig.blocks.check_integrity(idle=True)


def computed_outputs(model_dir: str, names: list[str], *, preempt: bool) -> dict[str, torch.Tensor]:
    """Of every computed token of some requests, [positions, LAYERS, HEADS, SIZE]."""
    asked = {**SHARED, "kv_policy": "mean"}
    with fake_gpu(model_dir, 60, kv_min_tokens=FLOOR, caching=False) as (rig, gpu):
        chunks = shared_chunks(rig, gpu)
        for count, name in enumerate(names):
            rig.add(name, [3 + count] * 120, asked, max_tokens=30)
        if len(names) > 1:
            rig.add("full", [2] * 60, None, max_tokens=60)
        while rig.scheduler.has_unfinished_requests():
            if preempt and rig.scheduler.requests["b"].num_computed_tokens > 140:
                preempt = False
                rig.settle()
                assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
            gpu.worker.execute_model(rig.step())
        assert gpu.replays[Variant.SHARED] and not preempt
        assert ("answer" in chunks) == (len(names) > 1)
        return {name: torch.stack([gpu.outputs[name, at] for at in range(149)]) for name in names}


@pytest.mark.long
def test_law05_a_request_that_shares_is_the_same_alone_and_among_others(model_dir: str) -> None:
    """vLLM's kernel cannot read it: ours attends, preempted and in any batch."""
    alone = computed_outputs(model_dir, ["b"], preempt=False)
    together = computed_outputs(model_dir, ["a", "b"], preempt=True)
    torch.testing.assert_close(alone["b"], together["b"], rtol=1e-5, atol=1e-6)
