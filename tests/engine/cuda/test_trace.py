# SPDX-License-Identifier: Apache-2.0
"""A trace on GPUs says what lies in the blocks there, and waits for no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cuda import trace
from h2o_vllm.engine.cuda.impl import key_value_views
from h2o_vllm.engine.cuda.trace import DeviceTraceRecorder
from h2o_vllm.engine.trace import traced_evictions
from tests.engine.cuda.fake_gpu import KV_HEADS, LAYERS, SIZE, UNEVEN, FakeGPU, fake_gpu, qkv
from tests.engine.cuda.test_ranks import COPIES, RANKS, asked
from tests.engine.cuda.test_waiting import Sampled
from tests.kernels.triton.rescore_laws import calibration_of

FLOOR = 32
NAME = f"{UNEVEN}-traced"


def positions_in(gpu: FakeGPU, blocks: tuple[int, ...], layer: int, seen: int) -> list[set[int]]:
    """Of each head: which of the request's positions lie in its lanes of some blocks."""
    keys = torch.stack([qkv(NAME, position, layer)[1] for position in range(seen)])
    there = key_value_views(gpu.kv[layer], SIZE)[0][list(blocks)].flatten(0, 1)
    held: list[set[int]] = [set() for _ in range(KV_HEADS)]
    for lane in range(KV_HEADS):
        for head in range(KV_HEADS):
            same = (there[:, lane, None] == keys[None, :, head]).all(-1)
            held[head].update(same.any(0).nonzero().flatten().tolist())
    return held


@pytest.mark.parametrize("heads", ["equal", "shared"])
def test_a_trace_is_what_lies_in_the_blocks(model_dir: str, heads: str) -> None:
    asked = {"kv_budget": 0.4, "kv_policy": "value+end", "kv_heads": heads, "kv_trace": True}
    with fake_gpu(model_dir, 60, kv_min_tokens=FLOOR, kv_trace=True, caching=False) as (rig, gpu):
        gpu.runner.sample_tokens = lambda _: Sampled(gpu.stream)
        recorder = gpu.state.recorder = DeviceTraceRecorder(gpu.state.to_device, KV_HEADS)
        rig.add(NAME, [1] * 130, asked, max_tokens=40)
        rig.add("other", [2] * 100, {"kv_budget": 0.4}, max_tokens=30)
        outputs: list[tuple[Eviction, AsyncModelRunnerOutput]] = []
        want: list[list[list[set[int]]]] = []
        while rig.scheduler.has_unfinished_requests():
            step = rig.step()
            gpu.stream.clock += 1
            gpu.worker.execute_model(step)
            output = gpu.worker.sample_tokens(None)
            for eviction in step.h2o.evictions:
                if eviction.request_id != NAME:
                    continue
                outputs.append((eviction, output))
                blocks = eviction.heavy_blocks
                want.append(
                    [positions_in(gpu, blocks, layer, eviction.seen) for layer in range(LAYERS)]
                )
        assert not recorder.follows("other") and len(outputs) > 2
        # All of them long after the device has gone on, in their order.
        gone = torch.zeros(LAYERS, KV_HEADS, 200, dtype=torch.bool)
        ranked = 0
        uneven = False
        for number, ((eviction, output), held) in enumerate(zip(outputs, want, strict=True)):
            (traced,) = traced_evictions(output.get_output())
            assert (traced.first, traced.seen) == (number == 0, eviction.seen)
            lost = torch.from_numpy(traced.lost)
            assert not (gone[:, :, : eviction.seen] & lost).any(), "a token goes twice"
            gone[:, :, : eviction.seen] |= lost
            ranked = eviction.fresh_from + 16 * len(eviction.fresh_blocks)
            for layer in range(LAYERS):
                for head in range(KV_HEADS):
                    kept = {at for at in range(ranked) if not gone[layer, head, at]}
                    assert held[layer][head] == kept
                uneven |= len({len(mine) for mine in held[layer]}) > 1
        assert uneven == (heads == "shared") and gone.any()


def test_scores_are_read_once_they_are_there(model_dir: str) -> None:
    """The step's output brings them; nobody waits for the device before."""
    asked = {"kv_budget": 0.4, "kv_policy": "h2o", "kv_trace": True, "kv_heads": "equal"}
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR, kv_trace=True) as (rig, gpu):
        gpu.runner.sample_tokens = lambda _: Sampled(gpu.stream)
        gpu.state.recorder = DeviceTraceRecorder(gpu.state.to_device, KV_HEADS)
        rig.add("one", [1] * 90, asked, max_tokens=20)
        while not (step := rig.step()).h2o.evictions:
            gpu.worker.execute_model(step)
        gpu.stream.clock += 1
        gpu.worker.execute_model(step)
        output = gpu.worker.sample_tokens(None)
        gpu.worker.execute_model(rig.step())
        assert gpu.stream.reached < 1
        assert len(traced_evictions(output.get_output())) == 1
        # A step without evictions has nothing to say.
        gpu.runner.sample_tokens = lambda _: ModelRunnerOutput(req_ids=[], req_id_to_index={})
        assert traced_evictions(gpu.worker.sample_tokens(None)) == ()


class Group:
    """All ranks. They run one after the other, so only the last one hears what all of them say."""

    def __init__(self, ranks: int) -> None:
        self.said: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self.rank = 0

    def all_gather(self, mine: torch.Tensor, dim: int) -> torch.Tensor:
        self.said[self.rank].append(mine)
        last = len(self.said[self.rank]) - 1
        said = [mine if len(one) <= last else one[last] for one in self.said]
        return torch.cat(said, dim)


@pytest.mark.parametrize(
    ("workers", "policy"),
    [(RANKS, "value+end"), (COPIES, "random")],
    ids=["ranks", "copies"],
)
def test_law11_the_rank_that_is_asked_says_what_one_worker_says(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, workers: list[dict[str, Any]], policy: str
) -> None:
    group = Group(len(workers))
    monkeypatch.setattr(trace, "get_tp_group", lambda: group)
    calibration = calibration_of(LAYERS, KV_HEADS, SIZE, own=True)
    options: dict[str, Any] = {"kv_min_tokens": FLOOR, "kv_trace": True, "caching": False}
    with fake_gpu(model_dir, 40, calibration=calibration, **options) as (rig, whole):
        parts = [
            FakeGPU(rig, 40, monkeypatch, "flash", calibration=calibration, **one)
            for one in workers
        ]
        whole.compiled = whole.compiled.union(*(part.compiled for part in parts))
        for gpu in (whole, *parts):
            gpu.runner.sample_tokens = lambda _: Sampled(parts[-1].stream)
            gpu.state.recorder = DeviceTraceRecorder(gpu.state.to_device, KV_HEADS)
        rig.add("traced", [1] * 110, asked(policy, kv_trace=True), max_tokens=30)
        rig.add("other", [3] * 60, asked(policy), max_tokens=30)
        evictions = 0
        while rig.scheduler.has_unfinished_requests():
            plan = rig.step()
            whole.worker.execute_model(plan)
            wanted = traced_evictions(whole.worker.sample_tokens(None).get_output())
            # vLLM asks rank 0.
            for rank in reversed(range(len(parts))):
                group.rank = rank
                parts[rank].worker.execute_model(plan)
                output = parts[rank].worker.sample_tokens(None)
            said = traced_evictions(output.get_output())
            assert [one[:3] for one in said] == [one[:3] for one in wanted]
            for one, other in zip(said, wanted, strict=True):
                assert np.array_equal(one.bits, other.bits)
                # The heads went their own ways.
                assert len({head.tobytes() for layer in one.lost for head in layer}) > 1
            evictions += len(said)
        assert evictions > 1 and all(len(one) == evictions for one in group.said)
