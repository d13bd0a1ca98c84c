# SPDX-License-Identifier: Apache-2.0
"""Who moves tokens and needs no scores reads, and publishes, what its first eviction frees: laws 2, 5, 6, 7.

On the real scheduler and a tiny real pool. Their tokens: ``test_doomed_hits_tokens.py``.
"""

from typing import Any

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.worker.state import waves
from tests.engine.scheduling import Rig

BLOCK = 16
PROMPT = list(range(1000, 1200))
BY_KEY = {"kv_budget": 0.2, "kv_policy": "key"}
READABLE = (200 - 40) // BLOCK * BLOCK
"""Of the prompt, at a budget of 0.2."""


def rig_of(model_dir: str, num_blocks: int = 100, **options: Any) -> Rig:
    return Rig(model_dir, num_blocks, **{"max_num_batched_tokens": 512} | options)


def test_law06_a_prompt_is_published_while_it_is_computed(model_dir: str) -> None:
    """As far as nobody will write it: a request that comes in the same step reads it, whatever its policy."""
    rig = rig_of(model_dir, max_num_batched_tokens=64)
    rig.add("computes", PROMPT, BY_KEY, max_tokens=40)
    for step in range(1, 5):
        rig.step()
        table = rig.blocks.req_to_blocks["computes"]
        published = [block.block_hash is not None for block in table]
        assert published == [
            index < min(4 * step, READABLE // BLOCK) for index in range(len(table))
        ]
    rig = rig_of(model_dir)
    rig.add("computes", PROMPT, BY_KEY, max_tokens=40)
    rig.add("key", PROMPT, BY_KEY | {"kv_budget": 0.4}, max_tokens=40)
    rig.add("full", PROMPT, max_tokens=40)
    rig.add("ranks", PROMPT, {"kv_budget": 0.2}, max_tokens=40)
    rig.add("protects", PROMPT, {"kv_budget": 0.2, "kv_protect": 50}, max_tokens=40)
    assert rig.step().num_scheduled_tokens == {
        "computes": 200, "key": 200 - 112, "full": 200 - READABLE, "ranks": 512 - 200 - 88 - 40,
    }  # fmt: skip
    rig.run()
    assert (
        rig.report("ranks")["tokens_cached"] == 0 and rig.report("protects")["tokens_cached"] == 64
    )


def test_choices_of_one_prompt_compute_and_hold_its_beginning_once(model_dir: str) -> None:
    """n = 8: all evict in one step, and rank the blocks that they share, each by scores of its own."""
    rig = rig_of(model_dir, 36)
    for index in range(8):
        rig.add(f"{index}_parent", PROMPT, BY_KEY, max_tokens=40)
    assert sum(rig.step().num_scheduled_tokens.values()) == 200 + 7 * (200 - READABLE)
    held = {block.block_id for table in rig.blocks.req_to_blocks.values() for block in table}
    assert len(held) == READABLE // BLOCK + 8 * 3
    evictions = rig.step().h2o.evictions
    assert len(evictions) == 8
    assert len({one.doomed_blocks for one in evictions}) == 1
    assert [len(wave) for wave in waves(evictions)] == [1] * 8
    rig.run()
    assert rig.preemptions == 0
    reports = rig.reports["7_parent"]
    assert [reports[str(i)]["tokens_cached"] for i in range(8)] == [0] + [READABLE] * 7


def test_what_another_reads_in_this_step_is_not_written_in_it(model_dir: str) -> None:
    """One gives back its share of blocks; of two that the other would write the first still moves tokens."""
    rig = rig_of(model_dir, 11)
    elastic = BY_KEY | {"kv_budget": 0.5, "kv_elastic": True}
    rig.add("elastic", PROMPT[:130], elastic, max_tokens=40)
    rig.step()
    fixed = rig.add("fixed", PROMPT[:128], BY_KEY | {"kv_budget": 0.1}, max_tokens=40)
    assert rig.step().num_scheduled_tokens["fixed"] == 128 - 112
    table = list(rig.blocks.req_to_blocks["elastic"])
    state = rig.blocks.eviction_state("elastic")
    evicted: list[Eviction] = []
    squeeze = rig.blocks.evict

    def noting(request_id: str, *args: Any) -> None:
        squeeze(request_id, *args)
        evicted.append(rig.blocks.evictions[request_id])

    rig.blocks.evict = noting
    # It needs a block, and none is free: its share frees none either.
    rig.step()
    assert [one.request_id for one in evicted] == ["fixed"]
    due = state.excess(132)
    written = {table[index].block_id for index in due.heavy}
    assert written & {*evicted[0].doomed_blocks}
    assert all(table[index].ref_cnt == 1 for index in due.heavy)
    assert fixed.num_preemptions == 1
    rig.run()
