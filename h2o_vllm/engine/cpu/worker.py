# SPDX-License-Identifier: Apache-2.0
"""Our worker on CPU: vLLM's, model runner V1. Runs in each worker process."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.compat import (
    runner_make_stage_inputs,
    runner_row_request_ids,
    runner_spared_generators,
    runner_write_table,
)
from h2o_vllm.engine.cpu import memory
from h2o_vllm.engine.cpu.attention import H2OAttentionImpl, H2OMetadataBuilder, register_backend
from h2o_vllm.engine.cpu.exact import ViewDrafter
from h2o_vllm.engine.cpu.rejection import DraftSampler
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.trace import TraceRecorder
from h2o_vllm.engine.worker.worker import EvictingWorker
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu.batch import check_caches

logger = init_logger(f"vllm.{__name__}")


def warn_of_mixed_adapters(config: VllmConfig) -> None:
    """Say which error of vLLM's LoRA on CPU to avoid, and how.

    ``bgmv_shrink`` and ``bgmv_expand`` (0.32, ``lora.ops.torch_ops``) take -1, "no adapter", for an index:
    that of the last slot. A batch without any adapter passes them by.
    """
    if config.lora_config is not None:
        logger.warning(
            "h2o: with LoRA on CPU vLLM gives requests without an adapter, beside others that have one, the "
            "adapter of the last slot: set --max-loras (%d) at least one above the number of adapters, so "
            "that it stays empty",
            config.lora_config.max_loras,
        )


class H2OCPUWorker(EvictingWorker[CPUState], CPUWorker):
    """``--worker-cls h2o_vllm.engine.cpu.worker.H2OCPUWorker``."""

    builder_cls = H2OMetadataBuilder
    impl_cls = H2OAttentionImpl

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        cache = vllm_config.cache_config
        self._sizes_pool = memory.is_unnamed(cache)
        if self._sizes_pool:
            cache.gpu_memory_utilization = memory.startable_utilization()
        super().__init__(vllm_config, *args, **kwargs)

    def determine_available_memory(self) -> int:
        """As the base class; where the user names no size, of a share of what is free now."""
        if self._sizes_pool:
            self.cache_config.kv_cache_memory_bytes = memory.pool_bytes(self.parallel_config)
        return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """As the base class; says what to avoid with LoRA."""
        if self.rank == 0:
            warn_of_mixed_adapters(self.vllm_config)
        super().initialize_from_config(kv_cache_config)
        if self.parallel_config.pipeline_parallel_size > 1:
            runner_make_stage_inputs(self.model_runner)
        if (speculative := self.vllm_config.speculative_config) is not None:
            runner = self.model_runner
            runner.rejection_sampler = DraftSampler(runner.sampler, speculative, runner.device)
        if isinstance(drafter := getattr(self.model_runner, "drafter", None), ViewDrafter):
            drafter.bind(self._bound_state(), self.model_runner, self._layer_names)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As the base class, also where a request with a seed has a prompt of several chunks.

        The output also says what traced requests lost.
        """
        with runner_spared_generators(self.model_runner):
            output = super().sample_tokens(grammar_output)
        recorder = None if self._state is None else self._state.recorder
        return output if recorder is None else recorder.attach(output)

    @staticmethod
    def _register_backend(vllm_config: VllmConfig) -> None:
        del vllm_config
        register_backend()

    def _left(self, scheduler_output: SchedulerOutput) -> Iterable[str]:
        # A preempted request keeps its place in runner V1, and returns without its policy.
        finished: set[str] = scheduler_output.finished_req_ids
        return finished

    def _write_table(self, state: CPUState, eviction: Eviction) -> None:
        group, runner = state.kv_cache_group, self.model_runner
        runner_write_table(runner, group, eviction.request_id, eviction.table_entries)

    def _make_state(self, layers: list[Any], group: Any) -> CPUState:
        kv_caches = [layer.kv_cache for layer in layers]
        num_heads = layers[0].impl.num_heads
        check_caches(kv_caches)
        planes = torch.zeros(2, len(layers), *kv_caches[0].shape[:3])
        state = CPUState(
            planes=planes,
            kv_cache_group=group.kv_cache_group_id,
            first_head=self._shard.first_number,
            kv_caches=kv_caches,
            row_request_ids=lambda: runner_row_request_ids(self.model_runner),
            calibration=self._calibration(kv_caches[0].shape[3] // 2),
            add_ranks=partial(torch.distributed.all_reduce, group=get_tp_group().cpu_group),
        )
        state.warm_up(num_heads)
        if self._h2o_config().kv_trace:
            state.recorder = TraceRecorder()
        return state

    def _bind_builder(self, builder: Any, state: CPUState) -> None:
        super()._bind_builder(builder, state)
        state.full_kernel = self._serves_every_row(builder)
        for drafters in self._drafter_builders():
            drafters.bind_drafter(state)
        layers = self.compilation_config.static_forward_context
        state.drafter_caches = [layers[name].kv_cache for name in sorted(self._drafter_layers())]

    def _serves_every_row(self, builder: H2OMetadataBuilder) -> bool:
        asked = self._h2o_config().kv_full_kernel
        return asked == "h2o" or (asked == "auto" and builder.displaced_amx and kernels.compiled())

    def _kernels_in_use(self, state: CPUState) -> str:
        rows = "every row" if state.full_kernel else "rows with scores"
        return f", kernels for {rows}: {kernels.describe()}"
