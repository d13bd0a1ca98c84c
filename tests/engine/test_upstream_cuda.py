# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM's GPU worker and model runner V2 we rely on. When one changes, this fails first.

All of it is Python that loads without a GPU.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.gpu_sync_debug import with_gpu_sync_check
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import fa_utils, flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu import attn_utils, cudagraph_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_worker import Worker

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


def test_a_graph_description_can_be_extended_and_compared() -> None:
    description = cudagraph_utils.BatchExecutionDescriptor
    assert dataclasses.is_dataclass(description)
    assert description.__dataclass_params__.frozen and description.__dataclass_params__.eq


def test_graphs_are_captured_through_the_next_class_in_line() -> None:
    """``VariantGraphManager`` puts a class of ours behind ``ModelCudaGraphManager``."""
    model = cudagraph_utils.ModelCudaGraphManager
    assert "super().capture(create_forward_fn" in inspect.getsource(model.capture)
    assert "super().run_fullgraph(desc)" in inspect.getsource(model.run_fullgraph)
    source = inspect.getsource(cudagraph_utils.CudaGraphManager.capture)
    assert "self._capture_descs[mode]" in source
    assert "self.graphs[desc] = graph" in source
    assert source.count("create_forward_fn(desc, warmup=") == 2
    # The choice at runtime is made from a list of its own.
    assert "_capture_descs" not in inspect.getsource(cudagraph_utils.CudaGraphManager.dispatch)


def test_metadata_is_built_for_capture_by_a_method_of_its_own() -> None:
    source = inspect.getsource(attn_utils.build_attn_metadata)
    assert "build_metadata_for_cudagraph_capture(" in source
    assert "req_idx=req_idx" in source
    assert "req_idx=input_batch.idx_mapping_np" in inspect.getsource(DefaultModelState.prepare_attn)
    # Hybrids are refused until it does.
    assert "req_idx" not in inspect.getsource(MambaHybridModelState.prepare_attn)


def test_a_step_removes_adds_and_then_applies_the_staged_writes() -> None:
    """Holes are staged before the step; requests that leave are gone before slots are reused."""
    source = inspect.getsource(GPUModelRunner.execute_model)
    steps = (
        "self.finish_requests(", "self.add_requests(", "self.update_requests(",
        "self.block_tables.apply_staged_writes()", "self.prepare_inputs(", "self.prepare_attn(",
    )  # fmt: skip
    places = [source.index(step) for step in steps]
    assert places == sorted(places)
    assert "preempted_req_ids" in inspect.getsource(GPUModelRunner.finish_requests)


def test_resumed_requests_reach_the_workers_as_new_ones() -> None:
    source = inspect.getsource(Scheduler.schedule)
    assert "scheduled_new_reqs.extend(scheduled_resumed_reqs)" in source


def test_the_request_table_keeps_its_mapping() -> None:
    """We hold on to the dictionary; it must not be replaced by another one."""
    source = inspect.getsource(RequestState)
    assert source.count("self.req_id_to_index:") + source.count("self.req_id_to_index =") == 1


def test_flash_attention_is_called_as_we_call_it_for_the_lse() -> None:
    """``H2OFlashImpl.attend_with_lse`` repeats this call for plain causal attention."""
    source = inspect.getsource(flash_attn.FlashAttentionImpl.forward)
    for argument in (
        "out=output[:num_actual_tokens]", "cu_seqlens_q=cu_seqlens_q", "max_seqlen_q=max_seqlen_q",
        "seqused_k=seqused_k", "max_seqlen_k=max_seqlen_k", "softmax_scale=self.scale",
        "block_table=block_table", "scheduler_metadata=scheduler_metadata",
        "fa_version=self.vllm_flash_attn_version", "num_splits=num_splits",
    ):  # fmt: skip
        assert argument in source
    assert "num_splits = attn_metadata.max_num_splits" in source
    assert "return_softmax_lse=True" in inspect.getsource(flash_attn.FlashAttentionImpl)


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
    for name in ("backends.py", "flash_warmup.py"):
        (call,) = [
            node
            for node in ast.walk(ast.parse((ours / "engine" / "cuda" / name).read_text()))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("flash_attn_varlen_func")
        ]
        given = {keyword.arg for keyword in call.keywords}
        assert {"return_softmax_lse", "q_descale"} <= given <= taken


def test_layers_have_the_scales_of_8_bit_kv() -> None:
    assert set(AttentionLayer.__annotations__) >= {"_q_scale", "_k_scale", "_v_scale"}


def test_our_place_in_the_registry_is_free() -> None:
    assert AttentionBackendEnum.CUSTOM.value is None
    assert AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value > AttentionCGSupport.NEVER.value
