# SPDX-License-Identifier: Apache-2.0
"""What we rely on in vLLM, and what no test that needs no GPU would miss.

The signatures of its GPU worker and model runner V2, which load without a GPU. Those of the scheduler, the
block pool and the CPU worker are called by the tests of the laws.
"""

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.gpu_sync_debug import with_gpu_sync_check
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import fa_utils, flash_attn, triton_attn
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from h2o_vllm.engine.compat import LimitingScheduler

FORWARD = "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
BUILD = "self common_prefix_len common_attn_metadata fast_build"

SIGNATURES: list[tuple[Callable[..., object], str]] = [
    (Worker._make_model_runner, "self"),
    (Worker.determine_available_memory, "self"),
    (Worker.initialize_from_config, "self kv_cache_config"),
    (Worker.compile_or_warm_up_model, "self"),
    (Worker.execute_model, "self scheduler_output"),
    (GPUModelRunner.initialize_kv_cache,
     "self kv_cache_config is_profiling kv_cache_allocation_context"),
    (GPUModelRunner.prepare_attn, "self input_batch"),
    (BlockTables.append_block_ids, "self req_index new_block_ids overwrite"),
    (StagedWriteTensor.stage_write, "self index start x"),
    (cudagraph_utils.CudaGraphManager._init_candidates, "self"),
    (cudagraph_utils.CudaGraphManager.capture, "self create_forward_fn progress_bar_desc"),
    (cudagraph_utils.CudaGraphManager.run_fullgraph, "self desc"),
    (cudagraph_utils.ModelCudaGraphManager.__init__,
     "self vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode "
     "ubatch_runner"),
    (AttentionMetadataBuilder.build, BUILD),
    (AttentionMetadataBuilder.build_for_cudagraph_capture, "self common_attn_metadata"),
    (flash_attn.FlashAttentionMetadataBuilder.build, BUILD),
    (flash_attn.FlashAttentionImpl.forward, FORWARD),
    (triton_attn.TritonAttentionMetadataBuilder.build, BUILD),
    (triton_attn.TritonAttentionImpl.forward, FORWARD),
    (async_tensor_h2d, "data device dtype out"),
    (fa_utils.get_flash_attn_version,
     "requires_alibi head_size head_size_v has_sinks requires_softcap kv_cache_block_size "
     "supports_fa4_hd256"),
    (fa_utils.uses_fa4_hd256_kernel, "head_size head_size_v"),
    (fa_utils.flash_attn_supports_kv_cache_dtype,
     "kv_cache_dtype requires_alibi head_size head_size_v has_sinks requires_softcap "
     "kv_cache_block_size supports_fa4_hd256"),
    (with_gpu_sync_check, "fn"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "expected"), SIGNATURES, ids=lambda x: getattr(x, "__qualname__", "")
)
def test_signatures(function: Callable[..., object], expected: str) -> None:
    assert list(inspect.signature(function).parameters) == expected.split()


FIELDS: list[tuple[type, str]] = [
    (CommonAttentionMetadata,
     "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens block_table_tensor "
     "slot_mapping req_idx seq_lens_cpu_upper_bound"),
    (flash_attn.FlashAttentionMetadata,
     "query_start_loc max_query_len seq_lens max_seq_len block_table scheduler_metadata max_num_splits"),
    (EngineArgs, "attention_backend"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "names"), FIELDS, ids=lambda x: getattr(x, "__name__", ""))
def test_fields(owner: type, names: str) -> None:
    assert set(names.split()) <= {field.name for field in dataclasses.fields(owner)}


def test_flash_attention_takes_what_we_give_it() -> None:
    """Its package does not load without its extensions: the signature is read from the text."""
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    path = Path(folder) / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    (function,) = [one for one in functions if one.name == "flash_attn_varlen_func"]
    taken = {argument.arg for argument in function.args.args}
    ours = Path(importlib.util.find_spec("h2o_vllm").submodule_search_locations[0])
    (call,) = [
        node
        for node in ast.walk(ast.parse((ours / "engine" / "cuda" / "backends.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("flash_attn_varlen_func")
    ]
    given = {keyword.arg for keyword in call.keywords}
    assert {"return_softmax_lse", "q_descale"} <= given <= taken


@pytest.mark.parametrize("more", [(), (64,), (None,)], ids=["0.32", "0.33", "0.33-unlimited"])
def test_a_look_into_the_prefix_cache_passes_on_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, more: tuple[int | None, ...]
) -> None:
    seen: list[tuple[object, ...]] = []

    def look(self: Scheduler, *given: object) -> tuple[str, int, int, bool]:
        seen.append(given)
        return "blocks", 32, 0, False

    monkeypatch.setattr(Scheduler, "_get_local_prefix_cache_hit", look)
    scheduler: Any = object.__new__(LimitingScheduler)
    assert scheduler._get_local_prefix_cache_hit("request", *more) == ("blocks", 32, 0, False)
    assert seen == [("request", *more)]


def test_every_look_into_the_prefix_cache_can_be_limited() -> None:
    parameters = list(inspect.signature(Scheduler._get_local_prefix_cache_hit).parameters)
    # The last one since 0.33.
    assert parameters in (["self", "request"], ["self", "request", "max_cache_hit_length"])


def test_offloading_sets_the_option_that_is_refused() -> None:
    config = VllmConfig(
        device_config=DeviceConfig("cpu"), cache_config=CacheConfig(kv_offloading_size=1.0)
    )
    assert config.kv_transfer_config is not None


def test_a_cpus_generators_cannot_be_wound_back() -> None:
    """When this fails, ``runner_spared_generators`` can go."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()
