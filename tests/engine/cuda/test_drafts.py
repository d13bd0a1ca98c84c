# SPDX-License-Identifier: Apache-2.0
"""Laws 4, 9 and 12 beside drafts: the model and its drafter on tables without holes, for blocks of both.

The model's attention is compared with a plain model that knows no drafts, the drafter's with the drafter's
own tokens in the blocks that are left.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.outputs import DraftTokenIds

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec
from h2o_vllm.engine.cuda import backends
from h2o_vllm.engine.cuda.builder import LiveTables, ScoringBuilder
from h2o_vllm.engine.cuda.variants import HOLES_ONLY, StepVariant, Variant
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.reference import attend
from tests.engine.cuda.fake_gpu import FakeGPU, check_outputs, fake_gpu
from tests.engine.cuda.fake_model import LAYERS, SCALE, qkv
from tests.engine.cuda.fake_runner import GRAPH_SIZES
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model
from tests.engine.cuda.test_support import bare_worker
from tests.engine.ghost import ANSWER
from tests.engine.scheduling import Rig

DRAFTS, NEW = 3, 50
ASKED: dict[str, tuple[int, dict[str, Any]]] = {
    "key": (70, {"kv_budget": 0.4, "kv_policy": "key", "kv_recent": 0.5}),
    "predicted": (95, {"kv_budget": 0.4, "kv_policy": "predicted+key", "kv_recent": 0.5}),
    "bounded": (150, {"kv_budget": 0.2, "kv_policy": "key", "kv_prefill_tokens": 64, "kv_recent": 0.5}),
    "full": (60, {"kv_budget": 1.0, "kv_policy": "key", "kv_recent": 0.5}),
}  # fmt: skip


class Drafter:
    """Drafts for the rig, of which the first ones are right, and computes the drafter's layer behind a step.

    Attributes:
        trimmed: how often a request got fewer drafts than there were.
        written: whose token the drafter's KV holds, by request and position.
        wrong: tokens of the batch that are no request's: they were drafted.
    """

    def __init__(self, rig: Rig, gpu: FakeGPU) -> None:
        self.rig, self.gpu, self.chance, self.trimmed = rig, gpu, random.Random(3), 0
        self.written: dict[tuple[str, int], str] = {}
        self.wrong: set[tuple[str, int]] = set()
        gpu.whose = self.whose

    def whose(self, name: str, position: int) -> str:
        return "wrong" if (name, position) in self.wrong else name

    def draft(self) -> None:
        names = [request.request_id for request in self.rig.scheduler.running]
        right = [self.chance.choice([0, 1, DRAFTS]) for _ in names]
        drafts = [[ANSWER] * count + [ANSWER + 1] * (DRAFTS - count) for count in right]
        self.rig.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def step(self) -> None:
        begins = {one.request_id: one.num_computed_tokens for one in self.rig.scheduler.running}
        output = self.rig.step()
        begins |= {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        ends = {name: begins[name] + n for name, n in output.num_scheduled_tokens.items()}
        certain = dict(ends)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            certain[name] -= len([*itertools.dropwhile(lambda token: token == ANSWER, drafts)])
            self.trimmed += len(drafts) < DRAFTS
        self.wrong = {(name, at) for name in ends for at in range(certain[name], ends[name])}
        self.gpu.worker.execute_model(output)
        for name, end in ends.items():
            for position in range(begins[name], end):
                self.written[name, position] = self.whose(name, position)
        for ahead in range(DRAFTS - 1):
            # The host takes each row to be as long as if no draft were rejected.
            more = max((ends[name] - certain[name] for name in ends), default=0)
            self.propose({name: end + ahead for name, end in certain.items()}, more)

    def propose(self, at: dict[str, int], more: int) -> None:
        """One token more of each request."""
        runner, gpu = self.gpu.runner, self.gpu
        self.wrong = set(at.items())
        self.written |= dict.fromkeys(self.wrong, "wrong")
        size = next(size for size in GRAPH_SIZES if size >= len(at))
        gpu.drafts = 0
        common = runner._common([*at], np.ones(len(at), dtype=np.int32), at, size, more)
        gpu.drafts = DRAFTS
        gpu.drafter.build(0, common)
        given = gpu.drafter_graphs[size], runner.slot_mapping, size
        (outputs,) = gpu.forward([*at.items()], *given, LAYERS)
        for (name, last), output in zip(at.items(), outputs, strict=False):
            table = runner.tables[-1].gpu[runner.req_states.req_id_to_index[name]]
            left = [p for p in range(last + 1) if table[p // gpu.block_size]]
            keys, values = (
                torch.stack([qkv(self.written[name, p], p, LAYERS)[kind] for p in left])[:, None]
                for kind in (1, 2)
            )
            where = torch.arange(len(left)), torch.zeros(len(left), dtype=torch.long)
            query = qkv("wrong", last, LAYERS)[0][None]
            _, expected, _ = attend(query, keys, values, where, SCALE)
            torch.testing.assert_close(output, expected[0].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "num_blocks"),
    [
        pytest.param("flash", 120, id="flash"),
        pytest.param("triton", 18, id="preempting-triton", marks=pytest.mark.slow),
    ],
)
def test_law12_model_and_drafter_read_what_is_left_of_their_own(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, base: str, num_blocks: int
) -> None:
    expected = {
        name: outputs_of(plain_model(asked, prompt, 16), name, NEW)
        for name, (prompt, asked) in ASKED.items()
    }
    with fake_gpu(
        model_dir, num_blocks, base, kv_min_tokens=FLOOR, caching=False, drafts=DRAFTS, ahead=True,
        kv_policy="key",
    ) as (rig, gpu):  # fmt: skip
        assert not gpu.drafter.supports_draft_decode_metadata_update
        drafter = Drafter(rig, gpu)
        monkeypatch.setattr(rig, "_draft", drafter.draft)
        for count, (name, (prompt, asked)) in enumerate(ASKED.items()):
            rig.add(name, [2 + count] * prompt, asked, max_tokens=NEW)
        while rig.scheduler.has_unfinished_requests():
            drafter.step()
        for name, outputs in expected.items():
            check_outputs(gpu, name, outputs)
        assert {one.request_id for one in rig.evictions} == {*ASKED} - {"full"}
        assert rig.accepted > 40 and drafter.trimmed
        assert gpu.replays[Variant.HOLES] > 5
        assert bool(rig.preemptions) == (num_blocks == 18)


def test_rows_that_only_a_drafters_graph_has_are_empty() -> None:
    table = torch.arange(1, 33, dtype=torch.int32).view(4, 8)
    tables = LiveTables(16, table)
    for lens in ([40, 50, 60, 70], [41, 51]):
        rows = len(lens)
        batch = CommonAttentionMetadata(
            query_start_loc=torch.arange(rows + 1), query_start_loc_cpu=torch.arange(rows + 1),
            seq_lens=torch.tensor(lens, dtype=torch.int32), num_reqs=rows, num_actual_tokens=rows,
            max_query_len=1, max_seq_len=128, block_table_tensor=table[:rows], slot_mapping=table[0],
        )  # fmt: skip
        found = tables.without_holes(batch)
        assert found.seq_lens.tolist() == lens
        assert tables._live.tolist() == [*lens, *[0] * (4 - rows)]


@pytest.mark.parametrize("backend", [backends.H2OFlashBackend, backends.H2OTritonBackend])
def test_graphs_hold_as_many_queries_as_vllms_where_nothing_is_scored(backend: Any) -> None:
    def support(speculative: object) -> Any:
        config: Any = SimpleNamespace(
            additional_config={"h2o": {}}, device_config=SimpleNamespace(device_type="cuda"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=speculative,
        )  # fmt: skip
        return backend.get_builder_cls().get_cudagraph_support(config, None)

    _, stock = backend.__bases__
    assert support(None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(object()) is stock.get_builder_cls()._cudagraph_support


class Builder(ScoringBuilder):
    """Ours, of no backend."""

    def __init__(self, name: str) -> None:
        self.layer_names, self.live_tables = [name], None
        spec = H2OAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
        self.group = SimpleNamespace(
            layer_names=[name], kv_cache_spec=spec, metadata_builders=[self]
        )

    def build(self, *_: Any, **__: Any) -> Any:
        """Not asked."""


def test_law09_builders_of_all_layers_are_ours_and_were_asked() -> None:
    """Where the drafter has other heads, vLLM's runner has a builder for its layers as well."""
    model, first, others, window = map(Builder, ("model", "drafter", "drafter", "window"))
    speculator = SimpleNamespace(
        draft_attn_layer_names={"drafter"}, attn_groups=[[others.group], []]
    )
    worker = bare_worker(
        model_runner=SimpleNamespace(
            step_variant=StepVariant(captured=HOLES_ONLY), speculator=speculator,
            attn_groups=[[model.group, first.group], [window.group]],
            block_tables=SimpleNamespace(input_block_tables=[torch.zeros(4, 8, dtype=torch.int32)]),
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        vllm_config=SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=True)),
    )  # fmt: skip
    worker._bind_builder(model, SimpleNamespace(kv_cache_group=0, block_size=16))
    assert first.live_tables is not None and window.live_tables is None
    for missing, builder in ((2, model), (1, others)):
        with pytest.raises(ConfigError, match=f"block tables of {missing} of 2 layers"):
            worker._check_graphs(SimpleNamespace())
        assert builder.live_tables is not None
        builder.live_tables.asked = True
    worker._check_graphs(SimpleNamespace())
