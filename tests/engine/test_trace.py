# SPDX-License-Identifier: Apache-2.0
"""A trace says what the engine holds: what lies in its blocks, which is what an independent H2O keeps."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from h2o_vllm.blocks.plan import Eviction, EvictionParams, StepPlan
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.trace import TraceRecorder
from h2o_vllm.kernels.cpu.batch import key_value_views
from h2o_vllm.policy.policy import Policy
from tests.engine.conftest import BLOCK_SIZE, FLOOR, Engine
from tests.engine.fidelity import STEPS, expect
from tests.engine.outputs import report_of, tokens_of
from tests.engine.scheduling import Rig
from tests.reference.policies import PolicyModel, load

LAYERS, HEADS, BLOCK, SIZE, BLOCKS = 2, 3, 16, 16, 12


def decoded(runs: list[int]) -> list[int]:
    """The number of each position's eviction, from run lengths; written from the documentation."""
    numbers: list[int] = []
    for number, count in zip(runs[::2], runs[1::2], strict=True):
        numbers += [number] * count
    return numbers


def held(trace: dict[str, Any], layer: int, head: int) -> list[int]:
    return [at for at, number in enumerate(decoded(trace["lost"][layer][head])) if number == 0]


def assert_sound(trace: dict[str, Any], report: dict[str, Any]) -> None:
    """What holds of every trace: it counts what the report counts, in each layer and, on average, head."""
    pairs = [(layer, head) for layer in range(trace["layers"]) for head in range(trace["kv_heads"])]
    kept = [0] * report["tokens_seen"]
    for layer, head in pairs:
        numbers = decoded(trace["lost"][layer][head])
        assert len(numbers) == report["tokens_seen"]
        if report["heads"] == "equal":
            assert numbers.count(0) == report["tokens_held"]
        assert max(numbers) <= len(trace["evicted_at"])
        for at in held(trace, layer, head):
            kept[at] += 1
    assert kept == trace["kept"]
    assert sum(kept) == report["tokens_held"] * len(pairs)
    assert all(one < other for one, other in pairwise(trace["evicted_at"]))


def state_of_positions() -> CPUState:
    """Blocks whose keys and values are their tokens' positions, and random scores."""
    gen = torch.Generator().manual_seed(0)
    caches = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE) for _ in range(LAYERS)]
    for cache in caches:
        keys, values = key_value_views(cache)
        positions = torch.arange(BLOCKS * BLOCK, dtype=torch.float32).view(BLOCKS, BLOCK)
        keys.copy_(positions[:, None, None].expand_as(keys))
        values.copy_(positions[:, None, :, None].expand_as(values))
    planes = torch.rand(2, LAYERS, BLOCKS, HEADS, BLOCK, generator=gen)
    scores = planes[0]
    # Ties and what ranks above all: the sinks.
    scores[:, 2:4] = 0.5
    scores[:, 1, :, :4] = float("inf")
    return CPUState(
        planes=planes, kv_cache_group=0, first_head=0, kv_caches=caches,
        row_request_ids=list, recorder=TraceRecorder(),
    )  # fmt: skip


H2O = Policy.parse("h2o").indices()
EVICTIONS = [
    Eviction("r", (1, 2), (3, 4, 5, 6), (3, 4, 5, 6), H2O, (1, 2, 3, 4, 5, 6), 16, seen=112),
    Eviction("r", (1, 2), (7,), (7,), H2O, fresh_blocks=(7,), fresh_from=112, seen=128),
    Eviction("r", (1,), (2, 8), (2, 8), H2O, fresh_blocks=(8,), fresh_from=128, seen=144),
]  # fmt: skip


def pages_of(state: CPUState, eviction: Eviction, layer: int, head: int) -> list[tuple[int, int]]:
    """Blocks and lanes in which a head's tokens lie behind an eviction."""
    lanes = state.lanes.owners("r", eviction.heavy_blocks)[layer].tolist()
    return [
        (block, lane)
        for block, owners in zip(eviction.heavy_blocks, lanes, strict=True)
        for lane, owner in enumerate(owners)
        if owner == head
    ]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kernel", ["cpp", "reference"])
def test_a_trace_is_what_lies_in_the_blocks(
    monkeypatch: pytest.MonkeyPatch, kernel: str, shares: bool
) -> None:
    from h2o_vllm.kernels import cpu as kernels

    module = kernels.load(kernel)
    monkeypatch.setattr(kernels, "load", lambda: module)
    state = state_of_positions()
    recorder = state.recorder
    # Otherwise all heads would want the same number of lanes.
    state.scores[:, 3:, 1] *= 1.5
    traced = EvictionParams(0, traced=True, shares_heads=shares)
    state.start(StepPlan({"r": traced, "s": EvictionParams(0)}))
    gone = [[set[int]() for _ in range(HEADS)] for _ in range(LAYERS)]
    known: set[int] = set()
    for number, eviction in enumerate(EVICTIONS):
        known |= {block * BLOCK + i for block in eviction.fresh_blocks for i in range(BLOCK)}
        state.compact([eviction])
        noted = recorder._noted.pop()
        assert (noted.first, noted.seen) == (number == 0, eviction.seen)
        taken = np.zeros((LAYERS, HEADS, BLOCKS * BLOCK), dtype=bool)
        taken[tuple(noted.lost)] = True
        # In each layer as many as the blocks that go hold.
        assert (taken.sum((1, 2)) == HEADS * BLOCK * len(eviction.doomed_blocks)).all()
        alike = {*taken.sum(2).flatten().tolist()} == {BLOCK * len(eviction.doomed_blocks)}
        assert alike != shares or number == 1
        for layer, cache in enumerate(state.kv_caches):
            keys, values = key_value_views(cache)
            for head in range(HEADS):
                lost = set(np.flatnonzero(taken[layer, head]).tolist())
                assert lost.isdisjoint(gone[layer][head])
                gone[layer][head] |= lost
                pages = pages_of(state, eviction, layer, head)
                for tokens in (
                    [keys[block, lane, 0] for block, lane in pages],
                    [values[block, lane, :, 0] for block, lane in pages],
                ):
                    there = torch.cat(tokens).int().tolist()
                    assert set(there) == known - gone[layer][head] and len(there) == len(set(there))
    state.release(["r"])
    state.compact(EVICTIONS[:1])
    assert recorder._noted == [] and recorder.attach("output") == "output"


@pytest.mark.e2e
def test_what_a_trace_holds_is_what_the_reference_keeps(
    clean: Engine, model_dir: str, text_tokens: list[int]
) -> None:
    prompt = text_tokens[200:600]
    case = expect(
        PolicyModel(load(model_dir), "attention", 0.3, 0.25, BLOCK_SIZE, FLOOR, 64), prompt
    )
    asked = {**case.asked, "kv_trace": True}
    (output,) = clean.generate([prompt], asked, max_tokens=STEPS)
    assert tokens_of(output) == case.tokens
    trace = report_of(output)["trace"]
    assert_sound(trace, report_of(output))
    assert len(trace["evicted_at"]) > 1 and trace["evicted_at"][0] == len(prompt)
    for layer in range(trace["layers"]):
        for head in range(trace["kv_heads"]):
            assert held(trace, layer, head) == case.reference.kept(layer, head)


@pytest.fixture
def rig(model_dir: str) -> Rig:
    return Rig(model_dir, 40, kv_trace=True)


def test_the_offline_api_refuses_what_cannot_be_traced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_vllm.blocks.counts.trace.MAX_TRACE_TOKENS", 110)
    rig.add("long", range(100), {"kv_trace": True}, max_tokens=11)
    rig.add("stops", range(100), {"kv_trace": True}, stop=["end"], detokenize=True)
    rig.add("fine", range(100), {"kv_trace": True})
    rig.run()
    assert rig.tokens["long"] == rig.tokens["stops"] == []
    assert len(rig.tokens["fine"]) == 8
    assert rig.report("fine")["trace"]["lost"] == [[[0, 107]]]
