# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: each full graph is captured once per variant; a step replays its own. Worker processes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import signature
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from h2o_vllm.engine.cuda.compat import FullGraphsManager
from h2o_vllm.engine.cuda.variants import HOLES_ONLY, StepVariant, Variant, variants_of
from h2o_vllm.engine.support.check import config_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass(frozen=True)
class VariantDescriptor(BatchExecutionDescriptor):
    """vLLM's descriptor of a captured graph, plus its variant."""

    variant: Variant = Variant.STOCK

    @classmethod
    def of(cls, desc: BatchExecutionDescriptor, variant: Variant) -> VariantDescriptor:
        """``desc`` for one variant."""
        values = {field.name: getattr(desc, field.name) for field in fields(desc)}
        return cls(**{**values, "variant": variant})


def _run_nothing(mode: CUDAGraphMode) -> None:
    """Replaces a forward pass that has nothing to warm up."""


class _VariantCapture(FullGraphsManager):
    """Captures each full graph once per variant, and replays the graph of the step's variant."""

    step_variant: StepVariant

    def full_graphs(
        self, stock: list[BatchExecutionDescriptor]
    ) -> Iterator[BatchExecutionDescriptor]:
        """All variants of the largest batch first: memory profiling samples the first two graphs."""
        variants = self.step_variant.captured
        return (VariantDescriptor.of(desc, variant) for desc in stock for variant in variants)

    def capture(self, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        """As the base class; also sets the variant for which the metadata builder builds.

        vLLM runs the model once before each capture, so that the capture compiles and allocates nothing. For
        each size only the first variant needs that run. The others add only our kernels, which are compiled
        once for all sizes and have run with the largest. So three variants take twice the time of one, not
        three times.
        """
        warm: set[tuple[Variant, int]] = set()

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
            if isinstance(desc, VariantDescriptor) and warmup:
                kind = desc.variant, desc.num_active_loras
                if kind in warm and desc.variant is not self.step_variant.captured[0]:
                    return _run_nothing
                warm.add(kind)
            # This call builds the metadata, which decides what is captured.
            self.step_variant.capturing = getattr(desc, "variant", None)
            try:
                return create_forward_fn(desc, warmup=warmup)
            finally:
                self.step_variant.capturing = None

        super().capture(create, *args, **kwargs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """As the base class, with the graph of this step's variant."""
        return super().run_fullgraph(VariantDescriptor.of(desc, self.step_variant.current))


class VariantGraphManager(ModelCudaGraphManager, _VariantCapture):
    """vLLM's graph manager with a full graph per batch size and variant.

    The order of the bases matters: the ``super()`` calls of ``ModelCudaGraphManager``, for captures and
    replays, must reach ours.
    """

    def __init__(self, step_variant: StepVariant, *args: Any, **kwargs: Any) -> None:
        self.step_variant = step_variant
        super().__init__(*args, **kwargs)


def captured_variants(manager: CudaGraphManager) -> dict[Variant, int]:
    """Number of captured full graphs per variant."""
    counts = dict.fromkeys(Variant, 0)
    for desc in manager.graphs:
        if isinstance(desc, VariantDescriptor):
            counts[desc.variant] += 1
    return counts


class H2OModelRunner(GPUModelRunner):
    """Model runner V2 with our graph manager, which also says which requests the rows of a batch are.

    The worker's ``_make_model_runner`` (0.32) creates it.
    """

    cudagraph_manager: Any

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self.step_variant = StepVariant(captured=variants_of(config_of(vllm_config)))
        super().__init__(vllm_config, *args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        """As the base class, which calls it once per batch, before the metadata is built.

        Of vLLM's model states only the default one passes ``req_idx``; those of hybrids, of models and of
        plugins do not (0.32, 0.33). Remove this when all of them do.
        """
        self.step_variant.slots = input_batch.idx_mapping_np
        return super().prepare_attn(input_batch)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """As the base class, also when it profiles memory: so it counts the graphs of all variants."""
        super().initialize_kv_cache(*args, **kwargs)
        if self.step_variant.captured == HOLES_ONLY:
            return
        stock = self.cudagraph_manager
        # By name, so that ours lacks nothing that the runner gives vLLM's.
        given = {name: getattr(stock, name) for name in signature(ModelCudaGraphManager).parameters}
        self.cudagraph_manager = VariantGraphManager(self.step_variant, **given)
