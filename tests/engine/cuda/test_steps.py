# SPDX-License-Identifier: Apache-2.0
"""Many steps of many requests through scheduler, worker, builder and attention, without a GPU.

The kept tokens, their scores and every attention output are compared with an independent H2O
(``tests/reference/h2o.py``), which never pages, moves, batches or replays anything.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from h2o_vllm.engine.cuda.impl import key_value_views
from h2o_vllm.engine.cuda.variants import Variant
from h2o_vllm.errors import AccountingError
from tests.engine.cuda.fake_gpu import (
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALE,
    SIZE,
    FakeGPU,
    fake_gpu,
    module_of,
    qkv,
)  # fmt: skip
from tests.engine.scheduling import Rig
from tests.reference.h2o import Reference

FLOOR = 32


@functools.cache
def reference_outputs(
    request_id: str,
    prompt: int,
    total: int,
    budget: float,
    recent: float,
    block: int,
    fp8: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    readers: int = 0,
) -> tuple[list[torch.Tensor], Reference]:
    """Attention of every token of one request, computed one by one. [LAYERS + readers, HEADS, SIZE] each."""
    reference = object.__new__(Reference)
    reference.fraction, reference.recent, reference.block = budget, recent, block
    reference.floor, reference.layers, reference.protected = FLOOR, {}, 0
    outputs = []
    for position in range(total):
        if position >= prompt and budget < 1:
            reference._evict()
        layers = []
        for layer in range(LAYERS + readers):
            q, k, v = (t[None, :, None] for t in qkv(request_id, position, layer, fp8))
            module = module_of(layer, readers)
            softmax = {"softcap": softcap, "s_aux": sinks}
            out, _ = reference._attend(module, q, k, v, scaling=SCALE, **softmax)
            layers.append(out[0, 0])
        outputs.append(torch.stack(layers))
    return outputs, reference


REQUESTS: dict[str, tuple[int, int, dict[str, Any] | None]] = {
    "tight": (150, 40, {"kv_budget": 0.3}),
    "full": (90, 40, None),
    "short": (5, 20, {"kv_budget": 0.2}),
    "heavy": (100, 50, {"kv_budget": 0.5, "kv_recent": 0.25}),
    "random": (70, 40, {"kv_budget": 0.4, "kv_policy": "random", "kv_protect": 0}),
    "window": (70, 40, {"kv_budget": 0.4, "kv_policy": "window"}),
    "late": (60, 40, {"kv_budget": 0.5, "kv_recent": 0.0}),
}
H2O = [name for name, (_, _, asked) in REQUESTS.items() if "kv_policy" not in (asked or {})]


def run(rig: Rig, gpu: FakeGPU, late: str = "late") -> None:
    for name, (prompt, new, asked) in REQUESTS.items():
        if name != late:
            rig.add(name, [1 + len(name)] * prompt, asked, max_tokens=new)
    for count in range(1000):
        if count == 8 and late:
            prompt, new, asked = REQUESTS[late]
            rig.add(late, [3] * prompt, asked, max_tokens=new)
        if not rig.scheduler.has_unfinished_requests():
            return
        gpu.worker.execute_model(rig.step())
    raise AssertionError("not done")


@pytest.mark.parametrize(
    ("base", "num_blocks", "pipelined", "kv_dtype"),
    [
        pytest.param("flash", 24, False, "auto", id="flash-preempting"),
        pytest.param("triton", 120, True, "auto", id="triton-async"),
        pytest.param("flash", 24, True, "fp8", id="flash-fp8"),
        pytest.param("flash", 120, False, "auto", id="flash-ample", marks=pytest.mark.long),
        pytest.param("triton", 24, False, "auto", id="triton-preempting", marks=pytest.mark.long),
        pytest.param("triton", 24, False, "fp8", id="triton-fp8", marks=pytest.mark.long),
    ],
)
def test_attention_equals_an_independent_h2o(
    model_dir: str, base: str, num_blocks: int, pipelined: bool, kv_dtype: str
) -> None:
    """With KV in 8 bits: one that computes with what these 8 bits stand for."""
    fp8 = kv_dtype == "fp8"
    with fake_gpu(
        model_dir,
        num_blocks,
        base,
        kv_dtype,
        pipelined=pipelined,
        kv_min_tokens=FLOOR,
        caching=False,
    ) as (rig, gpu):
        run(rig, gpu)
        for name in H2O:
            prompt, new, asked = REQUESTS[name]
            budget = (asked or {}).get("kv_budget", 1.0)
            recent = (asked or {}).get("kv_recent", 0.5)
            # The last token is sampled, never computed.
            expected, _ = reference_outputs(
                name, prompt, prompt + new - 1, budget, recent, rig.block_size, fp8
            )
            for position, outputs in enumerate(expected):
                torch.testing.assert_close(
                    gpu.outputs[name, position], outputs, rtol=1e-4, atol=1e-5,
                    msg=lambda text, at=position, who=name: f"{who} at {at}: {text}",
                )  # fmt: skip
        assert len({eviction.request_id for eviction in rig.evictions}) >= 5
        assert gpu.replays[Variant.MIXED] and gpu.replays[Variant.SCORED]
        assert bool(rig.preemptions) == (num_blocks == 24)


def test_a_batch_of_unknown_requests_is_not_run_once_any_evicts(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's model state for hybrids, for example, does not say which requests its rows are."""
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        told = gpu.runner._common
        monkeypatch.setattr(gpu.runner, "_common", lambda *a: replace(told(*a), req_idx=None))
        rig.add("stock", [1] * 60, None, max_tokens=8)
        for _ in range(2):
            gpu.worker.execute_model(rig.step())
        rig.add("evicts", [2] * 60, {"kv_budget": 0.5}, max_tokens=40)
        with pytest.raises(AccountingError, match="which requests are in the batch"):
            gpu.worker.execute_model(rig.step())


@pytest.mark.parametrize(
    ("base", "softcap", "with_sinks", "readers"),
    [
        pytest.param("flash", 0.0, False, 0, id="plain"),
        pytest.param("flash", 4.0, True, 0, id="cap-and-sinks"),
        pytest.param("triton", 4.0, False, 0, id="cap"),
        pytest.param("triton", 0.0, True, 0, id="sinks"),
        pytest.param("flash", 0.0, False, 2, id="read-by-others"),
    ],
)
def test_scores_and_kept_tokens_equal_an_independent_h2o(
    model_dir: str, base: str, softcap: float, with_sinks: bool, readers: int
) -> None:
    """``readers``: layers that read the KV of the last one; a key's score is the attention of all."""
    sinks = torch.linspace(1.0, 6.0, HEADS) if with_sinks else None
    with fake_gpu(
        model_dir, 40, base, softcap=softcap, sinks=sinks, kv_min_tokens=FLOOR, caching=False,
        readers=readers,
    ) as (rig, gpu):  # fmt: skip
        rig.add("one", [1] * 130, {"kv_budget": 0.4}, max_tokens=60)
        while rig.scheduler.requests:
            output = rig.step()
            live = [b.block_id for b in rig.blocks.req_to_blocks.get("one", []) if not b.is_null]
            gpu.worker.execute_model(output)
            request = rig.scheduler.requests.get("one")
            if request is not None and request.num_computed_tokens == 185:
                break
        expected, reference = reference_outputs(
            "one", 130, 185, 0.4, 0.5, rig.block_size, softcap=softcap, sinks=sinks, readers=readers
        )
        for position, outputs in enumerate(expected):
            torch.testing.assert_close(gpu.outputs["one", position], outputs, rtol=1e-4, atol=1e-5)
        held = rig.blocks.eviction_state("one").report()["tokens_held"]
        where = torch.tensor(live).repeat_interleave(rig.block_size)[:held]
        slots = torch.arange(rig.block_size).repeat(len(live))[:held]
        for layer in range(LAYERS):
            keys = key_value_views(gpu.kv[layer], SIZE)[0][where, slots]
            scores = gpu.state.scores[layer][where, :, slots]
            cache = reference.layers[layer]
            for head in range(KV_HEADS):
                distance = torch.cdist(
                    keys[:, head], cache.keys[0, head], compute_mode="donot_use_mm_for_euclid_dist"
                )
                nearest, position = distance.min(dim=1)
                assert nearest.max() == 0
                assert sorted(position.tolist()) == reference.kept(layer, head)
                torch.testing.assert_close(
                    scores[:, head], cache.scores[0, head][position], rtol=1e-4, atol=1e-5
                )
        assert HEADS % KV_HEADS == 0
        assert gpu.state.layers_captured(Variant.MIXED) == LAYERS + readers


def test_a_batch_without_budgets_gets_vllms_own_metadata(model_dir: str) -> None:
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        rig.add("full", [1] * 60, max_tokens=30)
        while rig.scheduler.has_unfinished_requests():
            gpu.worker.execute_model(rig.step())
        assert gpu.replays[Variant.STOCK] and not gpu.replays[Variant.MIXED]
        assert not gpu.state.scores.any()


def test_a_batch_of_dummies_between_two_steps_changes_nothing(model_dir: str) -> None:
    """It replays a graph, and the one of the last step would score that step's rows again."""
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        rig.add("scored", [1] * 60, {"kv_budget": 0.5}, max_tokens=30)
        for _ in range(4):
            gpu.worker.execute_model(rig.step())
        assert gpu.state.step_variant.current is Variant.SCORED
        scores, replays = gpu.state.scores.clone(), gpu.replays[Variant.STOCK]
        gpu.step_of_dummies(2)
        assert gpu.replays[Variant.STOCK] == replays + 1
        # Without a graph, as where another rank has a prompt, it is prepared as any batch.
        assert type(gpu.builder.build(0, gpu.dummies(2))) is flash_attn.FlashAttentionMetadata
        assert gpu.state.step_variant.current is Variant.STOCK
        assert scores.any() and torch.equal(gpu.state.scores, scores)
        scored = gpu.replays[Variant.SCORED]
        gpu.worker.execute_model(rig.step())
        assert gpu.replays[Variant.SCORED] == scored + 1


def test_a_slot_forgets_its_budget(model_dir: str) -> None:
    """The next request in a slot of the runner's table does not inherit the policy of the last one."""
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        for round_trip in range(3):
            rig.add(f"budget{round_trip}", [1] * 60, {"kv_budget": 0.5}, max_tokens=4)
            while rig.scheduler.has_unfinished_requests():
                gpu.worker.execute_model(rig.step())
            before = gpu.replays[Variant.STOCK]
            rig.add(f"full{round_trip}", [1] * 60, max_tokens=4)
            while rig.scheduler.has_unfinished_requests():
                gpu.worker.execute_model(rig.step())
            assert gpu.replays[Variant.STOCK] == before + 3
