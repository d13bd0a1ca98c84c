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
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
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
from vllm.v1.request import Request
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.version import __version_tuple__ as version_tuple

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


def test_the_registry_resolves_subclasses_of_full_attention() -> None:
    assert "FullAttentionSpec" in inspect.getsource(FullAttentionSpec.merge)
    assert "cls(" in inspect.getsource(FullAttentionSpec.merge)


def test_skipped_blocks_are_removed_before_allocation() -> None:
    """The order inside ``allocate_slots`` is what makes freed blocks usable in the same step."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    source = inspect.getsource(KVCacheManager.allocate_slots)
    steps = ("remove_skipped_blocks(", "get_num_free_blocks() - ", "allocate_new_blocks(")
    places = [source.index(step) for step in steps]
    assert places == sorted(places)


def test_requests_can_be_told_not_to_read_the_prefix_cache() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    assert "skip_reading_prefix_cache" in inspect.getsource(
        KVCacheManager.prefix_cache_lookup_enabled
    )
    assert "skip_reading_prefix_cache" in inspect.getsource(Request.__init__)


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
    """Also that of a request which returns after a preemption; answered as by ``get_computed_blocks``."""
    parameters = list(inspect.signature(Scheduler._get_local_prefix_cache_hit).parameters)
    # The last one since 0.33.
    assert parameters in (["self", "request"], ["self", "request", "max_cache_hit_length"])
    assert inspect.getsource(Scheduler.schedule).count("_get_local_prefix_cache_hit(") == 1
    assert "get_computed_blocks(" in inspect.getsource(Scheduler._get_local_prefix_cache_hit)
    looks = inspect.getsource(KVCacheManager.get_computed_blocks)
    assert "num_new_computed_tokens + num_uncached if num_uncached else 0" in looks


def test_offloading_sets_the_option_that_is_refused() -> None:
    config = VllmConfig(
        device_config=DeviceConfig("cpu"), cache_config=CacheConfig(kv_offloading_size=1.0)
    )
    assert config.kv_transfer_config is not None


def test_reports_have_a_way_out() -> None:
    assert "kv_transfer_params" in EngineCoreOutput.__struct_fields__
    assert "kv_transfer_params" in inspect.signature(RequestOutput.__init__).parameters


def test_children_of_a_parallel_request_are_named_after_it() -> None:
    assert 'f"{index}_{self.request_id}"' in inspect.getsource(ParentRequest.get_child_info)


def test_the_v1_model_runner_keeps_its_tables_where_we_punch_holes() -> None:
    source = inspect.getsource(GPUModelRunner._update_states)
    assert "block_ids.extend(new_ids)" in source
    assert "self.input_batch.req_id_to_index" in source


def test_the_v1_runners_drafter_says_which_layers_are_its_own() -> None:
    """Since 0.33 it marks them as V2 does: ``runner_drafter_layers`` can go with 0.32."""
    loads = inspect.getsource(SpecDecodeBaseProposer.load_model)
    assert "self._draft_attn_layer_names = {" in loads
    assert (".is_draft_layer = True" in loads) is (version_tuple >= (0, 33))
    binds = inspect.getsource(SpecDecodeBaseProposer.initialize_attn_backend)
    assert "attn_group.create_metadata_builders(" in binds and "self.draft_attn_groups =" in binds
    # Our builders see it as any other batch.
    assert "self.build(" in inspect.getsource(CPUAttentionMetadataBuilder.build_for_drafting)


def test_a_drafters_slots_are_those_that_admission_counts() -> None:
    ahead = inspect.getsource(VllmConfig.num_lookahead_tokens.fget)
    assert "use_eagle() or speculative_config.uses_draft_model()" in ahead
    assert "return self.num_speculative_tokens" in ahead


def test_a_cpus_generators_cannot_be_wound_back() -> None:
    """When this fails, ``runner_spared_generators`` can go."""
    source = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "gen.set_offset(gen.get_offset() - 4)" in source
    assert "self.discard_request_mask.np[:num_reqs]" in source
    assert "generators=self.generators" in inspect.getsource(InputBatch._make_sampling_metadata)
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()


def test_the_cpu_backend_ignores_the_custom_one() -> None:
    """When this fails, the override in ``engine/cpu/attention.py`` can go."""
    from vllm.platforms.cpu import CpuPlatform

    source = inspect.getsource(CpuPlatform.get_attn_backend_cls)
    assert "CUSTOM" not in source
    assert AttentionBackendEnum.CPU_ATTN.name == "CPU_ATTN"


def test_one_scheduler_serves_both_modes() -> None:
    """Ours passes by what the asynchronous one adds, where steps are synchronous."""
    assert AsyncScheduler.__bases__ == (Scheduler,)
