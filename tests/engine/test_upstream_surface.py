# SPDX-License-Identifier: Apache-2.0
"""The vLLM signatures we rely on. When one changes, this fails before users do."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.cpu_worker import CPUWorker

from h2o_vllm.engine.compat import LimitingScheduler

SIGNATURES: list[tuple[Callable[..., object], str]] = [
    (FullAttentionManager.remove_skipped_blocks,
     "self request_id processed_computed_tokens num_prompt_tokens"),
    (FullAttentionManager.allocate_new_blocks,
     "self request_id num_tokens num_tokens_main_model"),
    (FullAttentionManager.cache_blocks,
     "self request num_tokens retention_interval replay_boundaries"),
    (FullAttentionManager.pop_blocks_for_free, "self request_id"),
    (FullAttentionManager.add_local_computed_blocks,
     "self request_id new_computed_blocks num_local_computed_tokens num_external_computed_tokens"),
    (BlockPool.free_blocks, "self ordered_blocks"),
    (BlockPool.evict_blocks, "self block_ids"),
    (BlockPool.get_cached_block, "self block_hash kv_cache_group_ids"),
    (BlockHashToBlockMap.insert, "self key block"),
    (KVCacheBlock.set_block_hash, "self block_hash num_tokens"),
    (make_block_hash_with_group_id, "block_hash group_id"),
    (KVCacheManager.prefix_cache_lookup_enabled, "self request"),
    (Scheduler._reserve_prefill_lookahead, "self request num_computed_tokens num_new_tokens"),
    (Scheduler._handle_blocked_waiting_request, "self request"),
    (Scheduler._update_request_as_session, "self session update"),
    (Scheduler.finish_requests, "self request_ids finished_status"),
    (AsyncScheduler._update_after_schedule, "self scheduler_output"),
    (Scheduler._update_after_schedule, "self scheduler_output"),
    (AsyncScheduler._update_request_with_output, "self request new_token_ids is_stale"),
    (Scheduler._update_request_with_output, "self request new_token_ids is_stale"),
    (KVCacheManager.create_kv_cache_blocks, "self blocks"),
    (UnitaryKVCacheCoordinator.find_longest_cache_hit, "self block_hashes max_cache_hit_length"),
    (Scheduler.add_request, "self request"),
    (Scheduler.update_from_output, "self scheduler_output model_runner_output"),
    (KVCacheSpecRegistry.register, "kvcache_spec_cls manager_class uniform_type_base_spec"),
    (KVCacheSpecRegistry.check_kv_cache_spec_registry, "kv_cache_spec"),
    (AttentionBackend.customize_spec, "spec"),
    (CPUAttentionMetadataBuilder.build, "self common_prefix_len common_attn_metadata fast_build"),
    (CPUAttentionMetadataBuilder._set_isa_to_layers, "self layer_names"),
    (CPUAttentionBackendImpl.forward,
     "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"),
    (CPUWorker.determine_available_memory, "self"),
    (CPUWorker.initialize_from_config, "self kv_cache_config"),
    (CPUWorker.execute_model, "self scheduler_output"),
    (ParentRequest.get_child_info, "self index"),
    (register_backend, "backend class_path is_mamba"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "expected"), SIGNATURES, ids=lambda x: getattr(x, "__qualname__", "")
)
def test_signatures(function: Callable[..., object], expected: str) -> None:
    assert list(inspect.signature(function).parameters) == expected.split()


FIELDS: list[tuple[type, str]] = [
    (CommonAttentionMetadata,
     "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_seq_len "
     "block_table_tensor slot_mapping"),
    (CPUAttentionMetadata, "query_start_loc seq_lens block_table"),
    (FullAttentionSpec, "block_size num_kv_heads head_size sliding_window attention_chunk_size non_causal"),
    (EngineArgs, "scheduler_cls worker_cls additional_config block_size"),
    (VllmConfig, "additional_config speculative_config kv_transfer_config"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "names"), FIELDS, ids=lambda x: getattr(x, "__name__", ""))
def test_fields(owner: type, names: str) -> None:
    assert set(names.split()) <= {field.name for field in dataclasses.fields(owner)}


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


def test_reports_have_a_way_out() -> None:
    assert "kv_transfer_params" in EngineCoreOutput.__struct_fields__
    assert "kv_transfer_params" in inspect.signature(RequestOutput.__init__).parameters


def test_a_cpus_generators_cannot_be_wound_back() -> None:
    """When this fails, ``runner_spared_generators`` can go."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()


def test_one_scheduler_serves_both_modes() -> None:
    """Ours passes by what the asynchronous one adds, where steps are synchronous."""
    assert AsyncScheduler.__bases__ == (Scheduler,)
