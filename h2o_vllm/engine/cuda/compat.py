# SPDX-License-Identifier: Apache-2.0
"""Private or unstable names of vLLM's model runner V2, under the rules of ``engine/compat.py``.

Each entry says why it is needed, in which version, and when it can be removed.
``tests/engine/test_upstream.py`` checks them. They have a module of their own because the base class
below imports the GPU runner. Worker processes.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.utils.gpu_sync_debug import with_gpu_sync_check
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

sync_checked = with_gpu_sync_check
"""Decorator for a method of the worker: vLLM reports what waits for the GPU in it, if ``VLLM_GPU_SYNC_CHECK``
is set and the worker is warm. It is vLLM's own decorator (0.32), in no public module. vLLM's worker has it on
``execute_model``, which runs inside ours. Remove it when workers can choose what is checked."""


class FullGraphsManager(CudaGraphManager):
    """Lets subclasses choose which full graphs are captured.

    ``CudaGraphManager`` (0.32) keeps the graphs to capture in ``_capture_descs``, and the captured ones in
    ``graphs``, both by descriptor. ``dispatch`` chooses from a list of its own, which does not change. Remove
    this when an attention backend can have several graphs per batch size.
    """

    def full_graphs(
        self, stock: list[BatchExecutionDescriptor]
    ) -> Iterable[BatchExecutionDescriptor]:
        """The descriptors to capture instead of ``stock``, in this order."""
        return stock

    def _init_candidates(self) -> None:
        super()._init_candidates()
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if full:
            self._capture_descs[CUDAGraphMode.FULL] = list(self.full_graphs(full))


def layer_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An attention layer's scales of 8-bit queries, keys and values: one float32 each, on the device.

    The names of ``AttentionLayer`` (0.32) begin with an underscore, but it passes itself to implementations
    so that they read them. Some checkpoints have one scale per head, which our kernels do not support.
    """
    return layer._q_scale, layer._k_scale, layer._v_scale  # noqa: SLF001


def runner_request_slots(model_runner: Any) -> Mapping[str, int]:
    """Request id -> row of the runner's request table (0.32; ``RequestState`` has no accessor)."""
    slots: Mapping[str, int] = model_runner.req_states.req_id_to_index
    return slots


def runner_block_table(model_runner: Any, group: int) -> torch.Tensor:
    """The block tables that the metadata builder of a KV cache group gets, [max requests, MB], int32."""
    table: torch.Tensor = model_runner.block_tables.input_block_tables[group]
    return table


def runner_stage_entries(
    model_runner: Any, group: int, request_id: str, entries: Mapping[int, int]
) -> None:
    """Write block ids into a request's block table, with this step's other staged writes.

    Args:
        group: index of the table's KV cache group.
        request_id: the request; ignored if the runner does not have it.
        entries: table index -> block id, 0 for the null block.

    ``BlockTables`` (0.32) only appends, by ``stage_write``. The writes of a step are applied in parallel, and
    these write no index that an append writes. Remove this when ``CachedRequestData`` can replace single
    entries.
    """
    row = runner_request_slots(model_runner).get(request_id)
    if row is None:
        return
    table = model_runner.block_tables.block_tables[group]
    # In a run of contiguous indices, index minus rank is constant.
    for _, run in groupby(enumerate(sorted(entries)), key=lambda pair: pair[1] - pair[0]):
        indices = [index for _, index in run]
        table.stage_write(row, indices[0], [entries[index] for index in indices])
