# SPDX-License-Identifier: Apache-2.0
"""Readers of one prompt in one batch, on the GPU's adaptors: of protected tokens, and of what they will free.

Every attention output is compared with a plain model of its policy, which reads no cache.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.engine.cuda.fake_gpu import check_outputs, fake_gpu
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model

PROMPT, NEW = 140, 40
PINNED = 80
"""Of 70 protected tokens."""
BY_KEY: dict[str, Any] = {"kv_budget": 0.4, "kv_policy": "key", "kv_recent": 0.5}
READERS: dict[str, dict[str, Any]] = {
    "plain": BY_KEY,
    "more": BY_KEY | {"kv_budget": 0.6},
    "delay": BY_KEY | {"kv_delay": 5},
    "bounded": BY_KEY | {"kv_prefill_tokens": 64},
    # All queries counted, and scores adjusted.
    "attention": BY_KEY | {"kv_policy": "attention", "kv_protect": 70},
    "three": BY_KEY | {"kv_policy": "value+end+key", "kv_protect": 70},
}
PROTECTING = {
    policy.replace("+", "-"): BY_KEY | {"kv_policy": policy, "kv_protect": 70}
    for policy in ("attention", "mean", "value", "key", "end+key", "value+end+key")
}


@pytest.mark.parametrize(
    ("readers", "num_blocks", "pipelined", "base"),
    [
        pytest.param(READERS, 120, True, "triton", id="async-triton"),
        pytest.param(READERS, 17, False, "flash", id="preempting-flash", marks=pytest.mark.long),
        pytest.param(PROTECTING, 17, False, "flash", id="protecting", marks=pytest.mark.long),
    ],
)
def test_readers_of_one_prompt_keep_what_they_would_alone(
    model_dir: str, readers: dict[str, Any], num_blocks: int, pipelined: bool, base: str
) -> None:
    options: dict[str, Any] = {"pipelined": pipelined, "kv_min_tokens": FLOOR}
    options["max_num_batched_tokens"] = 512
    with fake_gpu(model_dir, num_blocks, base, **options) as (rig, gpu):
        # Names share the text before the plus, and with it every token's query, key and value.
        for name, asked in readers.items():
            rig.add(f"one+{name}", [5] * PROMPT, asked, max_tokens=NEW)
        rig.add("one+ranks", [5] * PROMPT, BY_KEY | {"kv_policy": "h2o"}, max_tokens=NEW)
        rig.add("one+full", [5] * PROMPT, None, max_tokens=NEW)
        meetings, left_out = 0, set[int]()
        while rig.scheduler.has_unfinished_requests():
            output = rig.step()
            gpu.worker.execute_model(output)
            pieces = gpu.state.workspace.pieces
            left_out |= {*pieces[pieces[:, 0] >= 0, 8].tolist()}
            for one, other in itertools.combinations(output.h2o.evictions, 2):
                meetings += not one.ranked_blocks.isdisjoint(other.ranked_blocks)
        # Of pinned tokens, whole tiles take no scratch, in which several rows would have them.
        tile = gpu.state.workspace.tile
        assert left_out == {0, PINNED // tile * tile}
        cached = {name: report["0"]["tokens_cached"] for name, report in rig.reports.items()}
        assert bool(rig.preemptions) == (num_blocks == 17)
        if num_blocks == 120:
            read = {"plain": 0, "more": 48, "delay": 80, "bounded": 16, "ranks": 0}
            read |= {"attention": PINNED, "three": PINNED}
            assert {name: cached[f"one+{name}"] for name in read} == read
            assert meetings >= 3
        else:
            assert sum(cached.values()) > 0
        for name, asked in readers.items():
            model = plain_model(asked, PROMPT, rig.block_size)
            who = f"one+{name}"
            check_outputs(gpu, who, outputs_of(model, "one", NEW), cached[who])
