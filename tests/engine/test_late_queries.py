# SPDX-License-Identifier: Apache-2.0
"""Where a policy ranks by the prompt's end: its last 32 queries have a step of their own.

Workers are told in that step which scores are early so far. What comes of it: ``test_policies.py``.
"""

from typing import Any

import pytest
import torch

from h2o_vllm.engine.cpu.state import CPUState
from tests.engine.scheduling import Rig

PROMPT = list(range(1000, 1100))
PARTED = {"kv_budget": 0.4, "kv_policy": "value+end+key"}


def rig_of(model_dir: str, **options: Any) -> Rig:
    return Rig(model_dir, 60, ghost=True, **options)


def chunks(rig: Rig, name: str, prompt: list[int], asked: Any) -> tuple[list[int], list[int]]:
    """Tokens of each step of a prompt; of how many blocks it tells that scores so far are early."""
    request = rig.add(name, prompt, asked, max_tokens=60)
    counts, told = [], []
    early = -(-(len(prompt) - 32) // rig.block_size)
    while request.num_computed_tokens < len(prompt):
        output = rig.step()
        counts.append(output.num_scheduled_tokens[name])
        told.append(len(output.h2o.early_blocks))
        table = rig.blocks.req_to_blocks[name][:early]
        assert [*output.h2o.early_blocks] == [one.block_id for one in table[early - told[-1] :]]
    rig.run()
    return counts, told


@pytest.mark.parametrize(
    ("asked", "length", "batched", "counts", "told"),
    [
        (PARTED, 100, 512, [68, 32], [0, 5]),
        (PARTED, 100, 40, [40, 28, 32], [0, 0, 5]),
        (PARTED, 100, 24, [24, 24, 20, 24, 8], [0, 0, 0, 5, 0]),
        (PARTED | {"kv_elastic": True}, 100, 512, [68, 32], [0, 5]),
        (PARTED | {"kv_protect": 20}, 100, 512, [68, 32], [0, 3]),
        # The early part of a token is not read after an eviction has ranked it.
        (PARTED | {"kv_prefill_tokens": 64}, 100, 512, [64, 4, 12, 16, 4], [0, 0, 2, 0, 0]),
        (PARTED, 33, 512, [1, 32], [0, 1]),
        (PARTED, 32, 512, [32], [0]),
        (PARTED | {"kv_budget": 1.0}, 100, 512, [100], [0]),
        *(
            ({"kv_budget": 0.4, "kv_policy": policy}, 100, 512, [68, 32], [0, 5])
            for policy in ("end", "predicted+end+key")
        ),
        *(
            ({"kv_budget": 0.4, "kv_policy": policy}, 100, 512, [100], [0])
            for policy in ("attention", "predicted+key")
        ),
        (None, 100, 512, [100], [0]),
    ],
)
def test_a_prompt_takes_one_step_more_if_it_has_to(
    model_dir: str, asked: Any, length: int, batched: int, counts: list[int], told: list[int]
) -> None:
    rig = rig_of(model_dir, max_num_batched_tokens=batched)
    assert chunks(rig, "a", PROMPT[:length], asked) == (counts, told)


def test_so_it_does_where_prompts_are_not_chunked(model_dir: str) -> None:
    rig = rig_of(model_dir, max_num_batched_tokens=512)
    rig.config.scheduler_config.enable_chunked_prefill = False
    assert chunks(rig, "a", PROMPT, PARTED) == ([68, 32], [0, 5])


def test_a_hit_that_ends_among_late_queries_leaves_late_ones_alone(model_dir: str) -> None:
    rig = rig_of(model_dir, max_num_batched_tokens=512)
    asked = PARTED | {"kv_protect": 80}
    assert chunks(rig, "a", PROMPT, asked) == ([68, 32], [0, 0])
    assert chunks(rig, "b", PROMPT, asked) == ([20], [0])


def test_a_preempted_prompt_ends_its_chunk_there_again(model_dir: str) -> None:
    """Its answer so far is computed with the prompt's last queries, and all of these are late."""
    rig = rig_of(model_dir, max_num_batched_tokens=512, caching=False)
    request = rig.add("a", PROMPT, PARTED | {"kv_delay": 20}, max_tokens=60)
    while request.num_tokens < 110:
        rig.step()
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    first, second = rig.step(), rig.step()
    assert (first.num_scheduled_tokens["a"], first.h2o.early_blocks) == (68, ())
    assert second.num_scheduled_tokens["a"] == 110 - 68
    assert len(second.h2o.early_blocks) == 5
    rig.run()


def test_a_worker_copies_the_scores_that_are_early() -> None:
    planes = torch.rand(2, 3, 8, 2, 16, generator=torch.Generator().manual_seed(0))
    scores, early = planes.clone()
    state = CPUState(
        planes=planes, kv_cache_group=0, first_head=0, kv_caches=[], row_request_ids=list
    )
    state.keep_early((5, 2))
    assert torch.equal(state.scores, scores)
    assert torch.equal(state.early[:, [2, 5]], scores[:, [2, 5]])
    assert torch.equal(state.early[:, [0, 1, 3, 4, 6, 7]], early[:, [0, 1, 3, 4, 6, 7]])
