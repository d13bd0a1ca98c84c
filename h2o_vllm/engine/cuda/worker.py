# SPDX-License-Identifier: Apache-2.0
"""Our worker for NVIDIA GPUs, on vLLM's worker with model runner V2. Runs in each worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu_worker import Worker

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec
from h2o_vllm.engine.compat import runner_metadata_builders
from h2o_vllm.engine.cuda.builder import ScoringBuilder
from h2o_vllm.engine.cuda.choice import register_backend, warn_of_triton
from h2o_vllm.engine.cuda.compat import (
    runner_block_table,
    runner_request_slots,
    runner_stage_entries,
    sync_checked,
)
from h2o_vllm.engine.cuda.graphs import H2OModelRunner, captured_variants
from h2o_vllm.engine.cuda.impl import (
    CudaScoringImpl,
    check_scales,
    check_softmaxes,
    key_value_views,
    kv_scales,
    numbers_of,
)
from h2o_vllm.engine.cuda.slots import PolicySlots
from h2o_vllm.engine.cuda.state import CudaState
from h2o_vllm.engine.cuda.timing import DeviceTimer
from h2o_vllm.engine.cuda.variants import HOLES_ONLY, Variant
from h2o_vllm.engine.cuda.warmup import check_launches, warm_up
from h2o_vllm.engine.support.check import config_of
from h2o_vllm.engine.worker.worker import EvictingWorker
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.kernels.triton.checks import check_layers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from h2o_vllm.blocks.plan import Eviction
    from h2o_vllm.calibration.file import Part

_FIXED_BYTES = 64 << 20
"""Memory of the kernels that does not depend on the pool, without their scratch: partial sums of prompts."""


def _sum_over_ranks(part: torch.Tensor) -> None:
    # On the stream, as vLLM does.
    part.copy_(get_tp_group().all_reduce(part))


class H2OGPUWorker(EvictingWorker[CudaState], Worker):
    """``--worker-cls h2o_vllm.engine.cuda.worker.H2OGPUWorker``."""

    builder_cls = ScoringBuilder
    impl_cls = CudaScoringImpl
    timer_cls = DeviceTimer
    # ``True`` once the kernels are compiled and the graphs captured.
    _serving = False
    _unscored: Sequence[ScoringBuilder] = ()
    """The builders of all layers, the drafter's included, of a server that scores nothing."""

    @staticmethod
    def _register_backend(vllm_config: VllmConfig) -> None:
        register_backend(vllm_config)

    def _make_model_runner(self) -> Any:
        if self.rank == 0:
            warn_of_triton(self.vllm_config)
        return H2OModelRunner(self.vllm_config, self.device)

    @sync_checked
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As the base class; vLLM's check for waits on the GPU covers compaction as well."""
        return super().execute_model(scheduler_output)

    def determine_available_memory(self) -> int:
        """As the base class, less the memory of our kernels, in bytes."""
        available = super().determine_available_memory()
        return available - self._workspace_bytes(available, self.get_kv_cache_spec().values())

    def _workspace_bytes(self, available: int, specs: Collection[KVCacheSpec]) -> int:
        """Upper bound of the kernels' memory beside the scores, in bytes, with ``available`` bytes of KV."""
        ours = [spec for spec in specs if isinstance(spec, H2OAttentionSpec)]
        spec, layers = ours[0], len(ours) if self._may_share() else 0
        # Blocks of other groups lie in the same memory, and no group has fewer layers than ours.
        blocks = available // sum(spec.page_size_bytes for spec in ours)
        tokens, rows = blocks * spec.block_size, self.scheduler_config.max_num_seqs
        workspace = kernels.DecodeWorkspace(
            rows,
            tokens,
            self.model_config.get_num_attention_heads(self.parallel_config),
            spec.num_kv_heads,
            self.model_config.dtype,
            spec.head_size,
            # Tensors without memory.
            "meta",
            sharing_layers=layers,
        )
        lanes = kernels.LaneTables.empty(layers, blocks, spec.num_kv_heads, rows, rows, "meta")
        # The tables and lengths of the metadata builder: 33 MB at 1,024 requests of 128K tokens.
        tables = 4 * rows * (-(-self.model_config.max_model_len // spec.block_size) + 8)
        if self.speculative_config is not None:
            # The model's, the drafter's first step, its others.
            tables *= 3
        held = workspace.nbytes + lanes.nbytes + tables
        held += len(ours) * self._calibration_bytes(spec.num_kv_heads, spec.head_size)
        return (
            int(held)
            + _FIXED_BYTES
            + self._scratch_bytes(spec.num_kv_heads)
            + self._read_bytes(spec)
        )

    def _calibration_bytes(self, kv_heads: int, size: int) -> int:
        """Upper bound of a layer's weights, in bytes: of this rank's heads, for all of the model's."""
        if self._h2o_config().kv_calibration is None:
            return 0
        of_heads = kv_heads * int(self.parallel_config.tensor_parallel_size)
        return 4 * of_heads * (2 * kv_heads * size + 1)

    def _may_share(self) -> bool:
        """Whether requests may let KV heads share slots."""
        return not config_of(self.vllm_config).equal_heads_reason

    def _scratch_bytes(self, kv_heads: int) -> int:
        """Scratch of compaction: one layer of the longest prompt's first eviction, in bytes."""
        return max(kernels.SCRATCH_BYTES, 8 * kv_heads * int(self.model_config.max_model_len))

    def _read_bytes(self, spec: H2OAttentionSpec) -> int:
        """Upper bound of what torch allocates to make scores, and keeps of each request, in bytes."""
        kept = 4 * spec.num_kv_heads * (2 * spec.head_size + 1) * self.scheduler_config.max_num_seqs
        # Of one layer of the longest prompt: scores by four ranks, their order, and what these are made of.
        ranked = 128 * spec.num_kv_heads * self.model_config.max_model_len
        # What is read, as it is, in float32, and what is computed of it.
        return int(3 * CudaState.read_bytes + ranked + kept)

    def compile_or_warm_up_model(self) -> Any:
        """As the base class, but compiles our kernels first, and then checks that the graphs hold them."""
        state = self._bound_state()
        check_launches(self.device)
        warm_up(state, self._first_layer, self.model_config.dtype)
        times = super().compile_or_warm_up_model()
        self._check_graphs(state)
        # vLLM's own warm-up has left scores that belong to no request.
        state.planes.zero_()
        self._serving = True
        return times

    def _left(self, scheduler_output: SchedulerOutput) -> Iterable[str]:
        finished: set[str] = scheduler_output.finished_req_ids
        return finished.union(scheduler_output.preempted_req_ids or ())

    def _write_table(self, state: CudaState, eviction: Eviction) -> None:
        group, runner = state.kv_cache_group, self.model_runner
        runner_stage_entries(runner, group, eviction.request_id, eviction.table_entries)
        state.punched(eviction.request_id, len(eviction.holes))

    def _bind_builder(self, builder: ScoringBuilder, state: CudaState) -> None:
        runner, drafter = self.model_runner, self._drafter_layers()
        table = runner_block_table(runner, state.kv_cache_group)
        if runner.step_variant.captured != HOLES_ONLY:
            builder.bind(state, table)
            return
        # A drafter begins on the runner's metadata, where other numbers of heads have builders of their own.
        found = runner_metadata_builders(runner)
        apart = [one for one, group in found if drafter.issuperset(group.layer_names)]
        self._unscored = [builder, *apart, *self._drafter_builders()]
        for one in self._unscored:
            one.drop_holes(state.block_size, table)

    def _make_state(self, layers: list[Any], group: Any) -> CudaState:
        spec, first = group.kv_cache_spec, layers[0]
        num_blocks, num_kv_heads, block_size, _ = first.kv_cache.shape
        kv_caches = [numbers_of(layer.kv_cache) for layer in layers]
        views = [key_value_views(kv_cache, spec.head_size) for kv_cache in kv_caches]
        kv_layers = kernels.KVLayers(
            [keys for keys, _ in views],
            [values for _, values in views],
            self._scratch_bytes(num_kv_heads),
        )
        shape = (2, len(layers), num_blocks, num_kv_heads, block_size)
        planes = torch.zeros(shape, device=self.device)
        self._first_layer, num_heads = first, first.impl.num_heads
        check_scales(layers)
        check_softmaxes([layer.impl for sharing in self._layers for layer in sharing])
        check_layers(kv_layers.key_caches, kv_layers.value_caches, num_heads)
        slots = runner_block_table(self.model_runner, group.kv_cache_group_id).shape[0]
        sharing = len(layers) if self._may_share() else 0
        sizes = (sharing, num_blocks, num_kv_heads, slots, slots, self.device)
        return CudaState(
            planes=planes,
            kv_cache_group=group.kv_cache_group_id,
            first_head=self._shard.first_number,
            kv_caches=kv_caches,
            calibration=self._device_calibration(layers, spec.head_size),
            add_ranks=_sum_over_ranks,
            kv_layers=kv_layers,
            workspace=kernels.DecodeWorkspace(
                slots,
                num_blocks * block_size,
                num_heads,
                num_kv_heads,
                self.model_config.dtype,
                spec.head_size,
                self.device,
                sharing_layers=sharing,
            ),
            lanes=kernels.LaneTables.empty(*sizes) if sharing else None,
            step_variant=self.model_runner.step_variant,
            request_slots=runner_request_slots(self.model_runner),
            policies=PolicySlots(slots),
        )

    def _device_calibration(self, layers: list[Any], size: int) -> Part | None:
        part = self._calibration(size)
        return None if part is None else part.on(self.device, size, kv_scales(layers))

    def _check_asked(self, builders: Sequence[ScoringBuilder]) -> None:
        """Law 9 where nothing is scored: check that vLLM's warm-up took each layer's tables from us.

        Raises:
            ConfigError: some layers' came from elsewhere.
        """
        if not self.vllm_config.kernel_config.enable_jit_warmup:
            # There was none.
            return
        asked = [one for one in builders if one.live_tables is not None and one.live_tables.asked]
        of_all, served = (
            {name for one in some for name in one.layer_names} for some in (builders, asked)
        )
        if of_all != served:
            raise ConfigError(
                f"h2o_vllm was not asked for the block tables of {len(of_all - served)} of {len(of_all)} "
                "layers: they would attend to null blocks; refusing to start"
            )

    def _check_graphs(self, state: CudaState) -> None:
        """Law 9 for CUDA graphs: check that the graphs for batches with budgets hold our kernels.

        Raises:
            ConfigError: a graph, or a layer in it, is missing.
        """
        mode = self.compilation_config.cudagraph_mode
        if self._unscored:
            self._check_asked(self._unscored)
            return
        if self.model_config.enforce_eager or not mode.has_full_cudagraphs():
            return
        counts = captured_variants(self.model_runner.cudagraph_manager)
        layers = sum(map(len, self._layers))
        for variant in self.model_runner.step_variant.captured:
            if variant is Variant.STOCK:
                continue
            captured = state.layers_captured(variant)
            if counts[variant] != counts[Variant.STOCK] or (counts[variant] and captured != layers):
                raise ConfigError(
                    f"CUDA graphs for {variant.value} batches: {counts[variant]} of "
                    f"{counts[Variant.STOCK]}, with our attention in {captured} of {layers} "
                    "layers. Scores would silently not be collected; refusing to start."
                )
