# SPDX-License-Identifier: Apache-2.0
"""One CUDA graph per variant and batch size: captured all, replayed the right one."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.engine.cuda.compat import runner_stage_entries
from h2o_vllm.engine.cuda.graphs import (
    H2OModelRunner,
    VariantDescriptor,
    VariantGraphManager,
    captured_variants,
)
from h2o_vllm.engine.cuda.variants import HOLES_ONLY, StepVariant, Variant
from tests.engine.rows import captured_by

pytestmark = pytest.mark.table


def make_manager(sizes: list[int], mode: CUDAGraphMode, policy: str = "h2o") -> VariantGraphManager:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager: Any = object.__new__(VariantGraphManager)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllm.v1.worker.gpu.cudagraph_utils.get_pp_group",
            lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        )
        patch.setattr(
            "vllm.v1.worker.gpu.cudagraph_utils.current_platform",
            SimpleNamespace(get_global_graph_pool=lambda: None),
        )
        variants = StepVariant(captured=captured_by(policy))
        manager.__init__(variants, config, torch.device("cpu"), mode, decode_query_len=1)
    made: VariantGraphManager = manager
    return made


@pytest.mark.parametrize("policy", ["h2o", "key"])
@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY], ids=lambda m: m.name
)
def test_every_full_graph_is_captured_once_per_variant(mode: CUDAGraphMode, policy: str) -> None:
    manager = make_manager([1, 2, 4], mode, policy)
    full = manager._capture_descs[CUDAGraphMode.FULL]
    assert [(d.num_tokens, d.variant) for d in full] == [
        (size, variant) for size in (4, 2, 1) for variant in captured_by(policy)
    ]
    piecewise = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
    assert len(piecewise) == (3 if mode is CUDAGraphMode.FULL_AND_PIECEWISE else 0)
    assert not any(isinstance(desc, VariantDescriptor) for desc in piecewise)


def test_one_variant_of_a_size_warms_up_for_all_and_the_builder_knows_which_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for the largest size all warm up: each launches kernels that the others do not."""
    manager = make_manager([1, 2, 4], CUDAGraphMode.FULL_AND_PIECEWISE)
    ran: list[tuple[int, Variant | None, bool]] = []

    def capture(self: Any, create: Any, progress_bar_desc: str = "") -> None:
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            for desc in self._capture_descs[mode]:
                for warmup in (True, False):
                    forward = create(desc, warmup=warmup)
                    assert self.step_variant.capturing is None
                    forward(CUDAGraphMode.NONE)

    def create(desc: Any, warmup: bool) -> Any:
        variant = getattr(desc, "variant", None)
        # Known while metadata is built.
        assert manager.step_variant.capturing is variant
        return lambda mode: ran.append((desc.num_tokens, variant, warmup))

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    # The call that ModelCudaGraphManager.capture makes with super().
    super(type(manager).__mro__[1], manager).capture(create, "Capturing")
    variants = manager.step_variant.captured
    assert [one for one in ran if one[1] and not one[2]] == [
        (size, variant, False) for size in (4, 2, 1) for variant in variants
    ]
    assert [one[:2] for one in ran if one[2]] == [
        *((size, None) for size in (4, 2, 1)),
        *((4, variant) for variant in variants),
        (2, Variant.STOCK), (1, Variant.STOCK),
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_a_step_replays_its_variant(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    manager = make_manager([1, 2], CUDAGraphMode.FULL_AND_PIECEWISE, policy)
    variants = manager.step_variant.captured
    replayed: list[Variant] = []
    for desc in manager._capture_descs[CUDAGraphMode.FULL]:
        manager.graphs[desc] = SimpleNamespace(replay=lambda v=desc.variant: replayed.append(v))
    manager._graphs_captured = True
    monkeypatch.setattr(
        "vllm.v1.worker.gpu.cudagraph_utils.get_offloader",
        lambda: SimpleNamespace(sync_prev_onload=lambda: None),
    )
    manager.hidden_states = torch.zeros(2, 1)
    for variant in variants:
        manager.step_variant.current = variant
        desc = manager.dispatch(2, 2, 1, 0, 1)
        assert type(desc) is BatchExecutionDescriptor and desc.cg_mode is CUDAGraphMode.FULL
        assert manager.run_fullgraph(desc).shape[0] == 2
    assert replayed == list(variants)
    assert captured_variants(manager) == dict.fromkeys(Variant, 0) | dict.fromkeys(variants, 2)


def test_the_runner_captures_for_the_servers_default_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GPUModelRunner, "__init__", lambda self, config, device: None)
    for policy, ranks in (("h2o", 1), ("window", 1), ("h2o", 2), ("h2o", 16)):
        config: Any = SimpleNamespace(
            additional_config={CONFIG_KEY: {"kv_policy": policy}},
            device_config=SimpleNamespace(device_type="cuda"),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            speculative_config=None,
            model_config=SimpleNamespace(
                model_arch_config=None, hf_text_config=None, get_total_num_kv_heads=lambda: 8
            ),
        )
        runner = H2OModelRunner(config, torch.device("cpu"))
        captured = captured_by(policy, "equal" if ranks == 1 else None)
        # With more ranks than heads nothing is scored.
        assert runner.step_variant.captured == (captured if ranks < 16 else HOLES_ONLY)


def test_our_manager_gets_all_that_vllms_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {name: object() for name in signature(ModelCudaGraphManager).parameters}
    assert {"varlen_decode", "ubatch_runner"} < given.keys()
    runner: Any = object.__new__(H2OModelRunner)
    runner.step_variant = StepVariant()

    def initialize(self: Any, config: object) -> None:
        self.cudagraph_manager = SimpleNamespace(**given)

    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", initialize)
    monkeypatch.setattr(
        VariantGraphManager,
        "__init__",
        lambda self, *of, **named: vars(self).update(of=of, **named),
    )
    runner.initialize_kv_cache(object())
    assert vars(runner.cudagraph_manager) == {"of": (runner.step_variant,), **given}
    runner.step_variant = StepVariant(captured=HOLES_ONLY)
    runner.initialize_kv_cache(object())
    assert vars(runner.cudagraph_manager) == given


def test_entries_of_a_table_are_staged_in_runs() -> None:
    writes: list[tuple[int, int, list[int]]] = []
    table = SimpleNamespace(stage_write=lambda *write: writes.append(write))
    runner = SimpleNamespace(
        req_states=SimpleNamespace(req_id_to_index={"a": 3}),
        block_tables=SimpleNamespace(block_tables=[None, table]),
    )
    runner_stage_entries(runner, 1, "a", {4: 31, 5: 30, 11: 0, 12: 0, 6: 0, 9: 0})
    runner_stage_entries(runner, 1, "unknown", {1: 0})
    assert writes == [(3, 4, [31, 30, 0]), (3, 9, [0]), (3, 11, [0, 0])]
