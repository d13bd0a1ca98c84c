# SPDX-License-Identifier: Apache-2.0
"""Segments that settle on the GPU's adaptors: turns of chats, readers at once, preemptions.

Every attention output is compared with a plain model, which reads no cache. Names share the text before the
plus, and with it every token's query, key and value.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.calibration.made import calibration_of
from tests.engine.cuda.fake_gpu import FakeGPU, check_outputs, fake_gpu
from tests.engine.cuda.fake_model import KV_HEADS, LAYERS, SIZE
from tests.engine.cuda.test_policies import FLOOR, outputs_of
from tests.engine.ghost import ANSWER
from tests.engine.scheduling import Rig
from tests.reference.settling import SettlingModel

WINDOW, PROMPT, NEW = 128, 230, 40
"""Segments of 32 tokens: two blocks, of which one stays. The first settles at 160 tokens."""
BY_KEY: dict[str, Any] = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": WINDOW}
LINEAGES = {
    "key": BY_KEY,
    "predicted-key": BY_KEY | {"kv_policy": "predicted+key"},
    "protected": BY_KEY | {"kv_protect": 20},
}


def run(rig: Rig, gpu: FakeGPU) -> None:
    """To the end; slots know of as many holes as the scheduler, those of hits included."""
    slots = gpu.runner.req_states.req_id_to_index
    while rig.scheduler.has_unfinished_requests():
        gpu.worker.execute_model(rig.step())
        for request in rig.scheduler.running:
            state = rig.blocks.eviction_state(request.request_id)
            assert state is not None
            known = gpu.state.policies.holes[slots[request.request_id]]
            assert known == state.holes


def plain_model(asked: dict[str, Any], prompt: int, block: int) -> SettlingModel:
    nothing: Any = None
    return SettlingModel(
        nothing, asked["kv_policy"], 0.5, 0.0, block, FLOOR, asked.get("kv_protect", 0),
        calibration=calibration_of(LAYERS, KV_HEADS, SIZE).weights, prompt=prompt, window=WINDOW,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_blocks", "pipelined", "base"),
    [
        pytest.param(120, True, "flash", id="async-flash"),
        pytest.param(32, False, "triton", id="preempting-triton", marks=pytest.mark.slow),
        pytest.param(32, True, "flash", id="preempting-async", marks=pytest.mark.long),
    ],
)
def test_law04_and_law05_turns_and_readers_attend_to_what_they_keep_alone(
    model_dir: str, num_blocks: int, pipelined: bool, base: str
) -> None:
    options: dict[str, Any] = {"pipelined": pipelined, "kv_min_tokens": FLOOR}
    options["max_num_batched_tokens"] = 256
    with fake_gpu(model_dir, num_blocks, base, **options) as (rig, gpu):
        for name, asked in LINEAGES.items():
            rig.add(f"one+{name}", [5] * PROMPT, asked, max_tokens=NEW)
        # One settles what the other finds, in the same steps.
        rig.add("one+twin", [5] * PROMPT, BY_KEY, max_tokens=NEW)
        rig.add("one+h2o", [5] * 100, {"kv_budget": 0.4}, max_tokens=NEW)
        rig.add("one+full", [5] * 60, None, max_tokens=NEW)
        run(rig, gpu)
        history = [*[5] * PROMPT, *[ANSWER] * NEW]
        for name, asked in LINEAGES.items():
            rig.add(f"one+{name}-next", [*history, *range(20)], asked, max_tokens=NEW)
        rig.add("one+branch", [*[5] * PROMPT, *range(60)], BY_KEY, max_tokens=NEW)
        run(rig, gpu)
        assert bool(rig.preemptions) == (num_blocks == 32)
        cached = {name: report["0"]["tokens_cached"] for name, report in rig.reports.items()}
        if num_blocks == 120:
            assert all(cached[f"one+{name}-next"] > 160 for name in LINEAGES)
            assert cached["one+branch"] > 160
            assert [one for one in rig.evictions if one.places and not one.moves], (
                "no request found a segment"
            )
        turns = {f"one+{name}": (asked, PROMPT) for name, asked in LINEAGES.items()}
        turns |= {f"{name}-next": (asked, len(history) + 20) for name, (asked, _) in turns.items()}
        turns |= {"one+twin": (BY_KEY, PROMPT), "one+branch": (BY_KEY, PROMPT + 60)}
        for name, (asked, prompt) in turns.items():
            expected = outputs_of(plain_model(asked, prompt, rig.block_size), "one", NEW)
            check_outputs(gpu, name, expected, cached[name])


def test_a_segment_settles_although_its_request_is_preempted_in_the_same_step(
    model_dir: str,
) -> None:
    """A request that finds it reads its best tokens; the slot that is left has no holes."""
    options: dict[str, Any] = {"policy": "priority", "kv_min_tokens": FLOOR}
    with fake_gpu(model_dir, 200, max_num_batched_tokens=64, **options) as (rig, gpu):
        low = rig.add("one+low", [5] * 170, BY_KEY, max_tokens=NEW, priority=1)
        while low.num_computed_tokens != 191:
            gpu.worker.execute_model(rig.step())
        slot = gpu.runner.req_states.req_id_to_index["one+low"]
        rig.add("high", range(5000, 5300), max_tokens=4)
        gpu.worker.execute_model(rig.step())
        rig.take(leave=1)
        gpu.worker.execute_model(rig.step())
        assert rig.both == rig.preemptions == 1 and rig.evictions[-1].seen == 192
        assert gpu.state.policies.holes[slot] == 0
        rig.give_back()
        rig.add("one+reader", [*[5] * 170, *[ANSWER] * 30], BY_KEY, max_tokens=NEW)
        run(rig, gpu)
        for name, prompt in (("one+low", 170), ("one+reader", 200)):
            expected = outputs_of(plain_model(BY_KEY, prompt, rig.block_size), "one", NEW)
            check_outputs(gpu, name, expected, cached=192)
