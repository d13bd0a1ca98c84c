# SPDX-License-Identifier: Apache-2.0
"""Private or unpromised names of vLLM's model runner V2, under the rules of ``engine/compat.py``.

Each entry says what it is for, since when it is needed, and what would make it go away.
``tests/engine/test_upstream_cuda.py`` pins them. A module of its own, because the base class below
loads the GPU runner. Worker processes.
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

__all__ = [
    "FullGraphsManager",
    "layer_scales",
    "runner_block_table",
    "runner_request_slots",
    "runner_stage_holes",
    "sync_checked",
]

sync_checked = with_gpu_sync_check
"""Decorates a method of the worker: whatever waits for the GPU in it is reported, if ``VLLM_GPU_SYNC_CHECK``
is set and once the worker is warm. vLLM's own decorator (0.32), in no public module; its worker's
``execute_model``, which runs inside of ours, wears it. Goes when workers can have more of theirs checked."""


class FullGraphsManager(CudaGraphManager):
    """Gives subclasses a say in which full graphs are captured.

    ``CudaGraphManager`` (0.32) keeps the graphs to capture in ``_capture_descs`` and the captured
    ones in ``graphs``, both by descriptor; ``dispatch`` chooses from a list of its own, which stays
    as it is. Goes when an attention backend can ask for several graphs per batch size.
    """

    def full_graphs(
        self, stock: list[BatchExecutionDescriptor]
    ) -> Iterable[BatchExecutionDescriptor]:
        """What to capture instead of ``stock``, in this order."""
        return stock

    def _init_candidates(self) -> None:
        super()._init_candidates()
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if full:
            self._capture_descs[CUDAGraphMode.FULL] = list(self.full_graphs(full))


def layer_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An attention layer's factors of 8-bit queries, keys and values: float32 on the device, of one element.

    ``AttentionLayer`` (0.32) declares them with an underscore, and passes itself to implementations so
    that they read them. Of one per head, which some checkpoints have, our kernels know nothing.
    """
    return layer._q_scale, layer._k_scale, layer._v_scale  # noqa: SLF001


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
