# SPDX-License-Identifier: Apache-2.0
"""Many steps of many requests through scheduler, worker, builder and attention, without a GPU.

The kept tokens, their scores and every attention output are compared with an independent H2O
(``tests/reference/policies.py``), which never pages, moves, batches or replays anything.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from h2o_vllm.engine.cuda.graphs import H2OModelRunner
from h2o_vllm.engine.cuda.impl import key_value_views
from h2o_vllm.engine.cuda.variants import Variant
from h2o_vllm.errors import AccountingError
from tests.engine.cuda.fake_gpu import check_outputs, fake_gpu
from tests.engine.cuda.fake_model import HEADS, KV_HEADS, LAYERS, SIZE
from tests.engine.cuda.test_policies import outputs_of, plain_model
from tests.engine.fidelity import positions
from tests.engine.scheduling import STATES

FLOOR = 32


@pytest.mark.parametrize("told", [False, True], ids=["unknown", "others"])
def test_a_batch_of_unknown_requests_is_not_run_once_any_evicts(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """As if a plugin's runner had a ``prepare_attn`` of its own, or vLLM had reordered the rows since."""
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        common = gpu.runner._common
        if told:
            others = np.arange(8)[::-1]
            monkeypatch.setattr(
                gpu.runner, "_common", lambda *a: replace(common(*a), req_idx=others)
            )
        else:
            monkeypatch.setattr(H2OModelRunner, "prepare_attn", GPUModelRunner.prepare_attn)
        rig.add("stock", [1] * 60, None, max_tokens=8)
        for _ in range(2):
            gpu.worker.execute_model(rig.step())
        rig.add("evicts", [2] * 60, {"kv_budget": 0.5}, max_tokens=40)
        with pytest.raises(AccountingError, match="which requests are in the batch"):
            gpu.worker.execute_model(rig.step())


@pytest.mark.parametrize(
    ("base", "softcap", "with_sinks", "readers", "block_size"),
    [
        pytest.param("flash", 0.0, False, 0, 16, id="plain"),
        pytest.param("flash", 4.0, True, 0, 16, id="cap-and-sinks"),
        pytest.param("triton", 4.0, False, 0, 16, id="cap"),
        pytest.param("triton", 0.0, True, 0, 16, id="sinks"),
        pytest.param("flash", 0.0, False, 2, 16, id="read-by-others"),
        pytest.param("flash", 0.0, False, 0, 528, id="beside-states"),
    ],
)
def test_scores_and_kept_tokens_equal_an_independent_h2o(
    model_dir: str, base: str, softcap: float, with_sinks: bool, readers: int, block_size: int
) -> None:
    """``readers``: layers that read the KV of the last one; a key's score is the attention of all.

    ``block_size``: beside layers that keep a state blocks are large, and no power of two.
    """
    sinks = torch.linspace(1.0, 6.0, HEADS) if with_sinks else None
    large = block_size > 16
    prompt, end = (1590, 1600) if large else (130, 185)
    beside = {
        "beside": [replace(STATES, block_size=block_size)],
        "block_size": block_size,
        "max_num_batched_tokens": 4 * block_size,
    }
    with fake_gpu(
        model_dir, 40, base, softcap=softcap, sinks=sinks, kv_min_tokens=FLOOR, caching=False,
        readers=readers, **beside if large else {},
    ) as (rig, gpu):  # fmt: skip
        rig.add("one", [1] * prompt, {"kv_budget": 0.4}, max_tokens=60)
        while rig.scheduler.requests:
            output = rig.step()
            live = [b.block_id for b in rig.blocks.req_to_blocks.get("one", []) if not b.is_null]
            gpu.worker.execute_model(output)
            request = rig.scheduler.requests.get("one")
            if request is not None and request.num_computed_tokens == end:
                break
        asked = {"kv_budget": 0.4, "kv_policy": "attention", "kv_recent": 0.5}
        reference = plain_model(asked, prompt, rig.block_size)
        new, softmax = end - prompt + 1, {"softcap": softcap, "sinks": sinks}
        check_outputs(gpu, "one", outputs_of(reference, "one", new, readers, **softmax))
        held = rig.blocks.eviction_state("one").report()["tokens_held"]
        where = torch.tensor(live).repeat_interleave(rig.block_size)[:held]
        slots = torch.arange(rig.block_size).repeat(len(live))[:held]
        for layer in range(LAYERS):
            keys = key_value_views(gpu.kv[layer], SIZE)[0][where, slots]
            scores = gpu.state.scores[layer][where, :, slots]
            known, wanted = reference.layers[layer].keys, reference.scores(layer)
            for head in range(KV_HEADS):
                position = positions(keys[:, head], known[head], tolerance=0)
                assert sorted(position.tolist()) == reference.kept(layer, head)
                torch.testing.assert_close(
                    scores[:, head], wanted[head, position], rtol=1e-4, atol=1e-5
                )
        assert rig.evictions and rig.evictions[0].heavy_blocks
        assert gpu.state.layers_captured(Variant.MIXED) == LAYERS + readers
        assert gpu.replays[Variant.SCORED]


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
