# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 5 and 6 if a load fails, with the next step already decided (asynchronous scheduling)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.engine.test_connector import Side, prompt_of, reports
from tests.engine.test_handover import ASKED, prefilled, side_of

KEY = {"kv_budget": 0.3, "kv_policy": "key"}
"""Evicted right behind the prompt: ``kv_delay`` is 0 in tests."""
STORED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kept": (ASKED, ASKED),
    "whole": ({"kv_budget": 1.0}, KEY),
    "whole, moves nothing": ({"kv_budget": 1.0}, {**KEY, "kv_policy": "window"}),
    "whole but its end": ({"kv_budget": 1.0}, {**KEY, "kv_policy": "end+key"}),
}
"""What the prefill server was asked for, and the decode server."""


def came_back(output: SchedulerOutput, lost: set[int] | None = None) -> ModelRunnerOutput:
    """A step's output in which each request gets a token; ``lost``: blocks that were not filled."""
    ids = [*output.num_scheduled_tokens]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: row for row, name in enumerate(ids)},
        sampled_token_ids=[[7] for _ in ids],
        kv_connector_output=KVConnectorOutput(invalid_block_ids=lost) if lost else None,
    )


def loading(
    model_dir: str, folder: Path, stored: str, blocks: int, *, again: bool = False
) -> tuple[Side, SchedulerOutput, set[int]]:
    """A decode server with a step in flight that loads a prompt, and the blocks which that needs."""
    prompt = prompt_of(150)
    prefilled(model_dir, folder, (prompt, STORED[stored][0]))
    more: dict[str, Any] = {"pipelined": True, "max_num_batched_tokens": 128}
    decode = side_of(model_dir, folder, "kv_consumer", blocks=blocks, **more)
    decode.add("lost", prompt, STORED[stored][1], max_tokens=20)
    if again:
        decode.add("again", prompt, STORED[stored][1], max_tokens=20)
    first = decode.scheduler.schedule()
    transfers = first.h2o.transfers
    (one, *_) = (*transfers.loads, *transfers.arrivals)
    assert set(one.table) == {b.block_id for b in decode.blocks.req_to_blocks["lost"]}
    return decode, first, set(one.table)


@pytest.mark.parametrize("stored", STORED)
def test_law02_blocks_that_were_to_be_loaded_go_to_nobody_before(
    model_dir: str, tmp_path: Path, stored: str
) -> None:
    """Else vLLM finds the lost blocks in another request's table, and ends that as well."""
    decode, first, lost = loading(model_dir, tmp_path, stored, blocks=16)
    decode.add("other", prompt_of(100, 3), max_tokens=20)
    second = decode.scheduler.schedule()
    assert [one.request_id for one in second.h2o.evictions] == ["lost"]
    decode.blocks.check_integrity()
    held = {block.block_id for block in decode.blocks.req_to_blocks.get("other", ())}
    assert lost.isdisjoint(held)
    decode.scheduler.update_from_output(first, came_back(first, lost))
    decode.scheduler.update_from_output(second, came_back(second))
    assert [*decode.scheduler.requests] == ["other"]
    decode.run()
    assert len(decode.tokens["other"]) + ("other" in second.num_scheduled_tokens) == 20


@pytest.mark.parametrize("stored", [name for name in STORED if name != "kept"])
@pytest.mark.parametrize("same_step", [False, True])
def test_law06_nobody_reads_what_may_not_have_come(
    model_dir: str, tmp_path: Path, stored: str, *, same_step: bool
) -> None:
    """Neither in the step that loads it, nor later in the prefix cache, where evictions leave blocks."""
    decode, first, lost = loading(model_dir, tmp_path, stored, 60, again=same_step)
    second = decode.scheduler.schedule()
    assert "lost" in {one.request_id for one in second.h2o.evictions}
    decode.scheduler.update_from_output(first, came_back(first, lost))
    decode.scheduler.update_from_output(second, came_back(second))
    assert [*decode.scheduler.requests] == ["again"] * same_step
    decode.run()
    shutil.rmtree(tmp_path)
    decode.add("later", prompt_of(150), max_tokens=2)
    decode.run()
    # Of the other one of the same prompt something may be there, which has come.
    assert same_step or reports(decode)["later"]["tokens_cached"] == 0


@pytest.mark.parametrize("pipelined", [False, True])
def test_what_has_come_is_found_by_others(
    model_dir: str, tmp_path: Path, *, pipelined: bool
) -> None:
    """What was loaded is published once the step is back, and elastic requests can be squeezed then."""
    prompts = [prompt_of(150, seed) for seed in range(3)]
    prefilled(model_dir, tmp_path, *((prompt, {"kv_budget": 1.0}) for prompt in prompts))
    decode = side_of(model_dir, tmp_path, "kv_consumer", blocks=36, pipelined=pipelined)
    decode.add("first", prompts[0], max_tokens=9)
    for _ in range(4):
        decode.step()
    decode.add("second", prompts[0], max_tokens=9)
    decode.run()
    assert decode.loaded == [144]
    assert reports(decode)["second"]["tokens_cached"] == 144
    for number, prompt in enumerate(prompts):
        decode.add(str(number), prompt, {**KEY, "kv_elastic": True}, max_tokens=120)
    decode.run()
    assert any(reports(decode)[str(number)]["squeezed_at"] for number in range(3))


def test_what_was_expected_and_not_admitted_holds_nothing(model_dir: str, tmp_path: Path) -> None:
    prompt = prompt_of(150)
    prefilled(model_dir, tmp_path, (prompt, {"kv_budget": 1.0}))
    decode = side_of(model_dir, tmp_path, "kv_consumer", blocks=20, pipelined=True)
    decode.take(leave=4)
    decode.add("waits", prompt, KEY, max_tokens=20)
    decode.step()
    assert "waits" not in decode.blocks.loads
    decode.give_back()
    decode.run()
    assert decode.loaded == [144] and decode.evictions
