# SPDX-License-Identifier: Apache-2.0
"""Private or unpromised names of vLLM's model runner V2, under the rules of ``engine/compat.py``.

Each entry says what it is for, since when it is needed, and what would make it go away.
``tests/engine/test_upstream_surface.py`` pins them. A module of its own, because the base
classes below load the GPU runner. Worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from h2o_vllm.engine.cuda.rows import StepVariant, Variant

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = [
    "H2OModelRunner",
    "VariantDescriptor",
    "VariantGraphManager",
    "captured_variants",
    "runner_block_table",
    "runner_request_slots",
    "runner_stage_holes",
]


@dataclass(frozen=True)
class VariantDescriptor(BatchExecutionDescriptor):
    """vLLM's description of a captured graph, plus which kernels it holds."""

    variant: Variant = Variant.STOCK

    @classmethod
    def of(cls, desc: BatchExecutionDescriptor, variant: Variant) -> VariantDescriptor:
        """``desc`` for one variant."""
        values = {field.name: getattr(desc, field.name) for field in fields(desc)}
        return cls(**{**values, "variant": variant})


class _VariantCapture(CudaGraphManager):
    """Captures each full graph once per variant, and replays the one the step needs.

    ``CudaGraphManager`` (0.32) keeps the graphs to capture in ``_capture_descs`` and the captured
    ones in ``graphs``, both by descriptor; ``dispatch`` chooses from a list of its own, which stays
    as it is. Goes when an attention backend can ask for several graphs per batch size.
    """

    step_variant: StepVariant

    def _init_candidates(self) -> None:
        super()._init_candidates()
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if full:
            # Largest batch first, all its variants together: memory profiling samples two of them.
            self._capture_descs[CUDAGraphMode.FULL] = [
                VariantDescriptor.of(desc, variant) for desc in full for variant in Variant
            ]

    def capture(self, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        def create(desc: BatchExecutionDescriptor, *args: Any, **kwargs: Any) -> Any:
            # The metadata that decides what is captured is built in here.
            self.step_variant.capturing = getattr(desc, "variant", None)
            try:
                return create_forward_fn(desc, *args, **kwargs)
            finally:
                self.step_variant.capturing = None

        super().capture(create, *args, **kwargs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        return super().run_fullgraph(VariantDescriptor.of(desc, self.step_variant.current))


class VariantGraphManager(ModelCudaGraphManager, _VariantCapture):
    """vLLM's graph manager with three full graphs per batch size.

    The order of the bases matters: ``ModelCudaGraphManager`` hands the capture loop, and the
    replay, to the next class in line. Its ``super()`` calls reach ours.
    """

    def __init__(self, step_variant: StepVariant, *args: Any, **kwargs: Any) -> None:
        self.step_variant = step_variant
        super().__init__(*args, **kwargs)


def captured_variants(manager: CudaGraphManager) -> dict[Variant, int]:
    """How many full graphs have been captured per variant."""
    counts = dict.fromkeys(Variant, 0)
    for desc in manager.graphs:
        if isinstance(desc, VariantDescriptor):
            counts[desc.variant] += 1
    return counts


class H2OModelRunner(GPUModelRunner):
    """Model runner V2 with our graph manager; made by the worker's ``_make_model_runner`` (0.32)."""

    cudagraph_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.step_variant = StepVariant()
        super().__init__(*args, **kwargs)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """As the base class, also when it profiles: the memory of all variants is then counted."""
        super().initialize_kv_cache(*args, **kwargs)
        stock = self.cudagraph_manager
        self.cudagraph_manager = VariantGraphManager(
            self.step_variant,
            stock.vllm_config,
            stock.device,
            stock.cudagraph_mode,
            decode_query_len=stock.decode_query_len,
            lora_capture_cases=stock.lora_capture_cases,
        )


def runner_request_slots(model_runner: Any) -> Mapping[str, int]:
    """Request id -> row of the runner's request table (0.32; ``RequestState`` has no accessor)."""
    slots: Mapping[str, int] = model_runner.req_states.req_id_to_index
    return slots


def runner_block_table(model_runner: Any, group: int) -> torch.Tensor:
    """The block tables a KV cache group's metadata builder gets, [max requests, MB], int32."""
    table: torch.Tensor = model_runner.block_tables.input_block_tables[group]
    return table


def runner_stage_holes(
    model_runner: Any, group: int, request_id: str, holes: tuple[int, ...]
) -> None:
    """Write the null block into a request's block table, with this step's other staged writes.

    Args:
        group: index of the KV cache group whose table it is.
        holes: table indices, ascending; a request the runner does not know is ignored.

    ``BlockTables`` (0.32) only appends; ``stage_write`` is what it appends with. Writes of one step
    are applied in parallel: these touch no index that an append touches. Goes when
    ``CachedRequestData`` can replace single entries.
    """
    row = runner_request_slots(model_runner).get(request_id)
    if row is None:
        return
    table = model_runner.block_tables.block_tables[group]
    # Neighbours differ from their rank by the same amount.
    for _, run in groupby(enumerate(holes), key=lambda pair: pair[1] - pair[0]):
        indices = [index for _, index in run]
        table.stage_write(row, indices[0], [0] * len(indices))
