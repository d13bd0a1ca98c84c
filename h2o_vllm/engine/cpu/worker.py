# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker, which compacts KV before each step. Runs in each worker process.

``execute_model`` of one step::

    compact      move survivors into the heavy blocks   (reads blocks the scheduler has freed)
    punch holes  the doomed blocks leave the block table
    forward      stock vLLM; the freed blocks may already be another request's
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from h2o_vllm.blocks.spec import register_spec
from h2o_vllm.engine.binding import evictable_group, evictable_layer, memory_less_scores
from h2o_vllm.engine.compat import (
    runner_metadata_builders,
    runner_punch_holes,
    runner_row_request_ids,
)
from h2o_vllm.engine.cpu.attention import H2OAttentionImpl, H2OMetadataBuilder, register_backend
from h2o_vllm.engine.cpu.state import WorkerState
from h2o_vllm.engine.support import check_supported
from h2o_vllm.engine.timing import EvictionTimer
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu.checks import check_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["H2OCPUWorker"]


class H2OCPUWorker(CPUWorker):
    """``--worker-cls h2o_vllm.engine.cpu.worker.H2OCPUWorker``."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config)
        # Here and not in the plugin: a plain ``vllm serve`` in this environment keeps its backend.
        register_backend()
        register_spec()
        super().__init__(vllm_config, *args, **kwargs)
        self._state: WorkerState | None = None
        self._timer = EvictionTimer()

    def determine_available_memory(self) -> int:
        """As the base class, less what the scores of the resulting blocks will take."""
        available = int(super().determine_available_memory())
        return memory_less_scores(available, self.get_kv_cache_spec().values())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """As the base class; then allocates the scores and binds every part (law 9)."""
        super().initialize_from_config(kv_cache_config)
        self._state = self._bind(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Compact what the scheduler evicted, then run the step.

        Raises:
            ConfigError: the step was not planned by our scheduler.
        """
        state, plan = self._state, getattr(scheduler_output, "h2o", None)
        if state is None or plan is None:
            raise ConfigError("a step without an h2o plan: our scheduler is not the one in charge")
        state.forget(scheduler_output.finished_req_ids)
        state.start(plan.policies)
        with self._timer.measure(plan.evictions):
            for eviction in plan.evictions:
                state.compact(eviction)
                runner_punch_holes(
                    self.model_runner, state.kv_cache_group, eviction.request_id, eviction.holes
                )
        state.in_step = True
        try:
            return super().execute_model(scheduler_output)
        finally:
            state.in_step = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As the base class; the output says how long this step's evictions took."""
        return self._timer.attach(super().sample_tokens(grammar_output))

    def _bind(self, kv_cache_config: KVCacheConfig) -> WorkerState:
        builder, group = evictable_group(
            runner_metadata_builders(self.model_runner), H2OMetadataBuilder
        )
        layers = [
            self._evictable_layer(name, kv_cache_config.num_blocks) for name in group.layer_names
        ]
        kv_caches = [layer.kv_cache for layer in layers]
        num_blocks, num_kv_heads, block_size, _ = kv_caches[0].shape
        scores = torch.zeros(len(layers), num_blocks, num_kv_heads, block_size)
        # The kernels check nothing: another shape or dtype would be a wild write.
        check_cache(kv_caches, scores, layers[0].impl.num_heads)
        state = WorkerState(
            kv_caches=kv_caches,
            scores=scores,
            kv_cache_group=group.kv_cache_group_id,
            first_kv_head=get_tensor_model_parallel_rank() * num_kv_heads,
            row_request_ids=lambda: runner_row_request_ids(self.model_runner),
        )
        state.warm_up(layers[0].impl.num_heads)
        builder.bind(state)
        for index, layer in enumerate(layers):
            layer.impl.bind(state.scores[index])
        logger.info(
            "h2o: %d evictable layers, block size %d, %.1f MiB of scores, kernels: %s",
            len(layers),
            block_size,
            state.scores.nbytes / 2**20,
            kernels.describe(),
        )
        return state

    def _evictable_layer(self, name: str, num_blocks: int) -> Any:
        layers = self.compilation_config.static_forward_context
        layer = evictable_layer(layers, name, num_blocks, H2OAttentionImpl)
        if not layer.kv_cache.is_contiguous():
            raise ConfigError(f"layer {name} has KV that is not contiguous, as our kernels need it")
        return layer
