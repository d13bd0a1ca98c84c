# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker, which compacts KV before each step. Runs in each worker process.

``execute_model`` of one step, all of it queued on the stream, none of it waited for::

    compact      move survivors into the heavy blocks   (reads blocks the scheduler has freed)
    punch holes  the doomed blocks leave the block table
    forward      stock vLLM; the freed blocks may already be another request's
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from h2o_vllm.blocks.spec import H2OAttentionSpec, register_spec
from h2o_vllm.engine.binding import evictable_group, evictable_layer, memory_less_scores
from h2o_vllm.engine.compat import runner_metadata_builders
from h2o_vllm.engine.cuda.backends import register_backend
from h2o_vllm.engine.cuda.builder import ScoringBuilder
from h2o_vllm.engine.cuda.compat import (
    H2OModelRunner,
    captured_variants,
    runner_block_table,
    runner_request_slots,
    runner_stage_holes,
)
from h2o_vllm.engine.cuda.impl import ScoringImpl, key_value_views
from h2o_vllm.engine.cuda.rows import PolicySlots, Variant
from h2o_vllm.engine.cuda.state import CudaState
from h2o_vllm.engine.cuda.warmup import warm_up
from h2o_vllm.engine.support import check_supported
from h2o_vllm.engine.timing import EvictionTimer
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.kernels.triton.checks import check_layers

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["H2OGPUWorker"]

_SCRATCH_BYTES = 64 << 20
"""What the kernels hold whatever the size of the pool: lists of moves, partial results."""


class H2OGPUWorker(Worker):
    """``--worker-cls h2o_vllm.engine.cuda.worker.H2OGPUWorker``."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config)
        # Here and not in the plugin: a plain ``vllm serve`` in this environment has no CUSTOM backend.
        register_backend(vllm_config)
        register_spec()
        super().__init__(vllm_config, *args, **kwargs)
        self._state: CudaState | None = None
        self._serving = False
        self._timer = EvictionTimer()

    def _make_model_runner(self) -> Any:
        return H2OModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """As the base class, less what the scores and the decode kernel's memory will take."""
        specs = self.get_kv_cache_spec().values()
        available = memory_less_scores(int(super().determine_available_memory()), specs)
        return available - self._workspace_bytes(available, specs)

    def _workspace_bytes(self, available: int, specs: Collection[KVCacheSpec]) -> int:
        """Upper bound of what the kernels hold beside the scores, once ``available`` bytes are KV."""
        spec = next(spec for spec in specs if isinstance(spec, H2OAttentionSpec))
        tokens = available // sum(spec.page_size_bytes for spec in specs) * spec.block_size
        workspace = kernels.DecodeWorkspace(
            self.scheduler_config.max_num_seqs,
            tokens,
            self.model_config.get_num_attention_heads(self.parallel_config),
            spec.num_kv_heads,
            spec.dtype,
            spec.head_size,
            # Shapes without memory.
            "meta",
        )
        return int(workspace.nbytes) + _SCRATCH_BYTES

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """As the base class; then allocates the scores and binds every part (law 9)."""
        super().initialize_from_config(kv_cache_config)
        self._state = self._bind(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """As the base class; our kernels are compiled first, and checked to be in the graphs after."""
        state = self._bound_state()
        warm_up(state, self._num_heads)
        times = super().compile_or_warm_up_model()
        self._check_graphs(state)
        # vLLM's own warm-up has used the KV cache; nothing of it is anybody's.
        state.scores.zero_()
        self._serving = True
        return times

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Compact what the scheduler evicted, then run the step.

        Raises:
            ConfigError: the step was not planned by our scheduler.
        """
        if not self._serving:
            # Steps that vLLM makes up to warm up its kernels.
            return super().execute_model(scheduler_output)
        state, plan = self._bound_state(), getattr(scheduler_output, "h2o", None)
        if plan is None:
            raise ConfigError("a step without an h2o plan: our scheduler is not the one in charge")
        gone = scheduler_output.finished_req_ids.union(scheduler_output.preempted_req_ids or ())
        state.policies.release(gone, state.request_slots)
        state.policies.start(plan.policies)
        with self._timer.measure(plan.evictions):
            state.compact(plan.evictions)
            for eviction in plan.evictions:
                runner_stage_holes(
                    self.model_runner, state.kv_cache_group, eviction.request_id, eviction.holes
                )
        state.in_step = True
        try:
            return super().execute_model(scheduler_output)
        finally:
            state.in_step = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As the base class; the output says how long launching this step's evictions took."""
        return self._timer.attach(super().sample_tokens(grammar_output))

    def _bound_state(self) -> CudaState:
        if self._state is None:
            raise ConfigError("vLLM did not hand our worker its KV cache: our scheduler is missing")
        return self._state

    def _bind(self, kv_cache_config: KVCacheConfig) -> CudaState:
        builder, group = evictable_group(
            runner_metadata_builders(self.model_runner), ScoringBuilder
        )
        context = self.compilation_config.static_forward_context
        layers = [
            evictable_layer(context, name, kv_cache_config.num_blocks, ScoringImpl)
            for name in group.layer_names
        ]
        spec, first = group.kv_cache_spec, layers[0]
        assert isinstance(spec, H2OAttentionSpec)
        num_blocks, num_kv_heads, block_size, _ = first.kv_cache.shape
        views = [key_value_views(layer.kv_cache, spec.head_size) for layer in layers]
        table = runner_block_table(self.model_runner, group.kv_cache_group_id)
        self._num_heads = first.impl.num_heads
        state = CudaState(
            kv_layers=kernels.KVLayers(
                [keys for keys, _ in views], [values for _, values in views]
            ),
            scores=torch.zeros(
                len(layers), num_blocks, num_kv_heads, block_size, device=self.device
            ),
            workspace=kernels.DecodeWorkspace(
                table.shape[0],
                num_blocks * block_size,
                self._num_heads,
                num_kv_heads,
                first.kv_cache.dtype,
                spec.head_size,
                self.device,
            ),
            kv_cache_group=group.kv_cache_group_id,
            # Heads are repeated where there are fewer than ranks.
            first_kv_head=get_tensor_model_parallel_rank()
            * self.model_config.get_total_num_kv_heads()
            // self.parallel_config.tensor_parallel_size,
            step_variant=self.model_runner.step_variant,
            request_slots=runner_request_slots(self.model_runner),
            policies=PolicySlots(table.shape[0]),
        )
        check_layers(
            state.kv_layers.key_caches,
            state.kv_layers.value_caches,
            state.scores,
            self._num_heads,
        )
        builder.bind(state, table)
        for index, layer in enumerate(layers):
            layer.impl.bind(state, index)
        logger.info(
            "h2o: %d evictable layers on top of %s, block size %d, %.1f MiB of scores",
            len(layers),
            type(first.impl).__mro__[2].__name__,
            block_size,
            state.scores.nbytes / 2**20,
        )
        return state

    def _check_graphs(self, state: CudaState) -> None:
        """Law 9 for CUDA graphs: what is replayed for a batch with budgets holds our kernels.

        Raises:
            ConfigError: a graph, or a layer in it, is missing.
        """
        mode = self.compilation_config.cudagraph_mode
        if self.model_config.enforce_eager or not mode.has_full_cudagraphs():
            return
        counts = captured_variants(self.model_runner.cudagraph_manager)
        layers = state.scores.shape[0]
        for variant in (Variant.MIXED, Variant.SCORED):
            captured = state.layers_captured(variant)
            if counts[variant] != counts[Variant.STOCK] or (counts[variant] and captured != layers):
                raise ConfigError(
                    f"CUDA graphs for {variant.value} batches: {counts[variant]} of "
                    f"{counts[Variant.STOCK]}, with our attention in {captured} of {layers} "
                    "layers. Scores would silently not be kept; refusing to start."
                )
        if mode.mixed_mode() is CUDAGraphMode.FULL:
            raise ConfigError(
                f"cudagraph_mode {mode.name} captures prompts as well, which are scored eagerly; "
                "use FULL_AND_PIECEWISE or FULL_DECODE_ONLY"
            )
