# SPDX-License-Identifier: Apache-2.0
"""What is refused on GPUs, and by which words; and that our arguments ask vLLM for our parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CompilationConfig, CompilationMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec
from h2o_vllm.engine.cuda import backends
from h2o_vllm.engine.cuda.builder import ScoringBuilder
from h2o_vllm.engine.cuda.impl import check_scales, check_softmaxes
from h2o_vllm.engine.cuda.variants import StepVariant, Variant
from h2o_vllm.engine.cuda.worker import H2OGPUWorker
from h2o_vllm.engine.worker import binding
from h2o_vllm.errors import ConfigError
from h2o_vllm.plugin import engine_args
from tests.engine.rows import captured_by

pytestmark = pytest.mark.table


def test_scales_per_head_are_refused() -> None:
    def layer(dtype: torch.dtype = torch.uint8, **scales: Any) -> Any:
        one = dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), torch.ones(()))
        return SimpleNamespace(**{**one, **scales}, kv_cache=torch.zeros(1, dtype=dtype))

    # What is not read may be as it likes.
    unread = layer(torch.bfloat16, _v_scale=torch.ones(8))
    check_scales([layer(), layer(_k_scale=torch.ones(1)), unread])
    with pytest.raises(ConfigError, match="one per head"):
        check_scales([layer(), layer(_v_scale=torch.ones(8))])


def test_the_engine_arguments_name_our_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type="cuda"))
    args = engine_args(kv_budget=0.2)
    assert args["attention_backend"] == backends.BACKEND == "CUSTOM"
    assert args["worker_cls"] == f"{H2OGPUWorker.__module__}.{H2OGPUWorker.__qualname__}"
    assert "block_size" not in args


@pytest.mark.parametrize("backend", [backends.H2OFlashBackend, backends.H2OTritonBackend])
def test_our_backends_are_vllms_but_for_three_parts(backend: Any) -> None:
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert type(backend.customize_spec(spec)) is H2OAttentionSpec
    _, stock = backend.__bases__
    assert issubclass(backend.get_impl_cls(), stock.get_impl_cls())
    assert issubclass(backend.get_builder_cls(), stock.get_builder_cls())
    assert backend.get_impl_cls().stock is stock.get_impl_cls()


def bare_worker(**attributes: Any) -> H2OGPUWorker:
    worker = object.__new__(H2OGPUWorker)
    for name, value in {"_serving": True, "_state": None, **attributes}.items():
        object.__setattr__(worker, name, value)
    return worker


@pytest.mark.parametrize("state", [None, SimpleNamespace()], ids=["unbound", "no-plan"])
def test_a_step_that_our_scheduler_did_not_plan_is_not_run(state: object) -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        bare_worker(_state=state).execute_model(SimpleNamespace())


def graphs(
    variants: dict[Variant, int], layers: dict[Variant, int], mode: Any, policy: str = "h2o"
) -> Any:
    state = SimpleNamespace(
        scores=torch.zeros(1, 1, 1, 1), layers_captured=lambda variant: layers[variant]
    )
    captured = StepVariant(captured=captured_by(policy))
    worker = bare_worker(
        # The second one reads the KV of the first.
        _layers=[["first", "second"]],
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_config=SimpleNamespace(enforce_eager=False),
        model_runner=SimpleNamespace(cudagraph_manager=None, step_variant=captured),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h2o_vllm.engine.cuda.worker.captured_variants", lambda _: variants)
        worker._check_graphs(state)


def test_graphs_without_our_kernels_do_not_serve() -> None:
    from vllm.config.compilation import CUDAGraphMode

    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    all_of_them = dict.fromkeys(Variant, 5)
    graphs(all_of_them, dict.fromkeys(Variant, 2), mode)
    graphs(dict.fromkeys(Variant, 0), dict.fromkeys(Variant, 0), CUDAGraphMode.PIECEWISE)
    with pytest.raises(ConfigError, match="in 1 of 2 layers"):
        graphs(all_of_them, {Variant.MIXED: 2, Variant.SCORED: 1}, mode)
    with pytest.raises(ConfigError, match="0 of 5"):
        graphs({Variant.STOCK: 5, Variant.MIXED: 0, Variant.SCORED: 5}, all_of_them, mode)
    no_holes, in_one = {Variant.HOLES: 0}, {Variant.HOLES: 1}
    graphs(all_of_them | no_holes, dict.fromkeys(Variant, 2) | in_one, mode)
    with pytest.raises(ConfigError, match="holes batches: 0 of 5"):
        graphs(all_of_them | no_holes, dict.fromkeys(Variant, 2), mode, "window")
    with pytest.raises(ConfigError, match="holes batches: 5 of 5, with our attention in 1 of 2"):
        graphs(all_of_them, dict.fromkeys(Variant, 2) | in_one, mode, "window")


def test_no_graph_holds_prompts_which_are_scored_eagerly() -> None:
    """vLLM captures them under ``FULL`` if the attention supports it."""
    for name, served in (("FULL", "FULL_AND_PIECEWISE"), ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY")):
        compilation = CompilationConfig(cudagraph_mode=name, mode=CompilationMode.VLLM_COMPILE)
        compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
        support = ScoringBuilder._cudagraph_support
        assert compilation.resolve_cudagraph_mode_and_sizes(support, "ours").name == served


def test_scores_take_their_share_of_the_memory() -> None:
    ours = H2OAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    # 2 * 64 * 2 bytes of KV, and 2 * 4 of its score and the early part of it, per token and head.
    assert binding.memory_less_scores(26_000_000, {"a": ours, "b": ours}) == 26_000_000 * 256 // 264
    # Sliding-window layers lie in the same blocks, which are as large as the evictable layers' alone.
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64
    )
    assert (
        binding.memory_less_scores(26_000_000, {"w": window, "a": ours}) == 26_000_000 * 256 // 264
    )
    # A drafter's layers have KV in each block, and no scores.
    both = {"a": ours, "drafter": ours}
    left = binding.memory_less_scores(26_000_000, both, frozenset({"drafter"}))
    assert left == 26_000_000 * 512 // 520


WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=1024
)


def test_models_without_full_attention_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"full attention, and .* vLLM keeps SlidingWindowSpec"):
        binding.memory_less_scores(1 << 30, {"a": WINDOW, "b": WINDOW})


@pytest.mark.parametrize("groups", [1, 6])
def test_the_workspace_is_for_all_blocks_beside_other_groups(groups: int) -> None:
    """Groups lie in the same memory: one of six layers has as many blocks alone as beside five of windows."""
    ours = H2OAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    specs = [ours] * 6 + [WINDOW] * 6 * (groups - 1)
    worker = bare_worker(
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=None,
        speculative_config=None,
        vllm_config=SimpleNamespace(additional_config={"h2o": {}}),
        model_config=SimpleNamespace(
            max_model_len=8192, dtype=torch.bfloat16, get_num_attention_heads=lambda _: 32
        ),
        _may_share=lambda: False,
        _scored_tokens=lambda tokens: tokens,
    )
    alone = worker._workspace_bytes(1 << 32, [ours] * 6)
    assert worker._workspace_bytes(1 << 32, specs) == alone
    assert worker._workspace_bytes(1 << 33, specs) > alone
    # The builder has a block table for each request.
    worker.model_config.max_model_len = 1 << 20
    longer = worker._workspace_bytes(1 << 32, specs)
    worker.scheduler_config.max_num_seqs += 1024
    assert worker._workspace_bytes(1 << 32, specs) > longer + 1024 * 4 * (1 << 20) // 16


@pytest.mark.parametrize(("kv_heads", "longest"), [(2, 8192), (8, 131_072), (32, 131_072)])
def test_the_longest_prompts_first_eviction_fits_the_scratch(kv_heads: int, longest: int) -> None:
    """Else the step that evicts would end the engine."""
    worker = bare_worker(model_config=SimpleNamespace(max_model_len=longest))
    assert worker._scratch_bytes(kv_heads) == max(32 << 20, 8 * kv_heads * longest)


def test_layers_that_need_other_kernels_than_the_first_are_refused() -> None:
    """Forms that were not compiled before serving would compile while it lasts."""

    def layer(softcap: float = 0.0, sinks: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(logits_soft_cap=softcap, sinks=sinks)

    sinks = torch.ones(4)
    check_softmaxes([layer(30.0, sinks), layer(50.0, torch.zeros(4))])
    for other in (layer(), layer(30.0), layer(0.0, sinks), layer(30.0, sinks.bfloat16())):
        with pytest.raises(ConfigError, match="only some layers"):
            check_softmaxes([layer(30.0, sinks), other])
