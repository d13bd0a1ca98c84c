# SPDX-License-Identifier: Apache-2.0
"""Who needs no scores reads what it will free, on the GPU's adaptors: several of one prompt in one batch.

Every attention output is compared with a plain model of its policy, which reads no cache.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.engine.cuda.fake_gpu import fake_gpu
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model

PROMPT, NEW = 140, 40
BY_KEY: dict[str, Any] = {"kv_budget": 0.4, "kv_policy": "key", "kv_recent": 0.5}
READERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "more": {"kv_budget": 0.6},
    "delay": {"kv_delay": 5},
    "protected": {"kv_protect": 40},
    "bounded": {"kv_prefill_tokens": 64},
}


@pytest.mark.parametrize(
    ("num_blocks", "pipelined", "base"),
    [
        pytest.param(120, True, "triton", marks=pytest.mark.slow),
        pytest.param(17, False, "flash", marks=pytest.mark.long),
    ],
    ids=["async-triton", "preempting-flash"],
)
def test_readers_of_one_prompt_keep_what_they_would_alone(
    model_dir: str, num_blocks: int, pipelined: bool, base: str
) -> None:
    options: dict[str, Any] = {"pipelined": pipelined, "kv_min_tokens": FLOOR}
    options["max_num_batched_tokens"] = 512
    with fake_gpu(model_dir, num_blocks, base, **options) as (rig, gpu):
        # Names share the text before the plus, and with it every token's query, key and value.
        for name, asked in READERS.items():
            rig.add(f"one+{name}", [5] * PROMPT, BY_KEY | asked, max_tokens=NEW)
        rig.add("one+ranks", [5] * PROMPT, BY_KEY | {"kv_policy": "h2o"}, max_tokens=NEW)
        rig.add("one+full", [5] * PROMPT, None, max_tokens=NEW)
        meetings = 0
        while rig.scheduler.has_unfinished_requests():
            output = rig.step()
            gpu.worker.execute_model(output)
            for one, other in itertools.combinations(output.h2o.evictions, 2):
                meetings += not one.ranked_blocks.isdisjoint(other.ranked_blocks)
        cached = {name: report["0"]["tokens_cached"] for name, report in rig.reports.items()}
        assert cached["one+plain"] == cached["one+ranks"] == 0
        if num_blocks == 120:
            assert cached["one+more"] == 48 and cached["one+bounded"] == 16
            # The protected one could read 96: nobody has published more.
            assert cached["one+delay"] == cached["one+protected"] == 80
            assert meetings >= 3
        else:
            assert sum(cached.values()) > 0
        assert bool(rig.preemptions) == (num_blocks == 17)
        for name, asked in READERS.items():
            model = plain_model(BY_KEY | asked, PROMPT, rig.block_size)
            for position, expected in enumerate(outputs_of(model, "one", NEW)):
                if (f"one+{name}", position) not in gpu.outputs:
                    # Read from the cache.
                    assert position < cached[f"one+{name}"]
                    continue
                torch.testing.assert_close(
                    gpu.outputs[f"one+{name}", position], expected, rtol=1e-4, atol=1e-5,
                    msg=lambda text, at=position, who=name: f"{who} at {at}: {text}",
                )  # fmt: skip
