# SPDX-License-Identifier: Apache-2.0
"""The worker's state on GPUs: requests by slot, scores, calls of the Triton kernels. Worker process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from h2o_vllm.engine.cuda.variants import StepVariant, Variant, variant_of
from h2o_vllm.engine.worker.rows import StepRows
from h2o_vllm.engine.worker.state import WorkerState
from h2o_vllm.errors import AccountingError
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.blocks.plan import Eviction, StepPlan
    from h2o_vllm.engine.cuda.batch import ScoredBatch
    from h2o_vllm.engine.cuda.slots import PolicySlots
    from h2o_vllm.kernels.triton import DecodeWorkspace, KVLayers, LaneTables


@dataclass(kw_only=True)
class CudaState(WorkerState):
    """Scores, and which requests evict.

    Attributes:
        kv_layers: the same KV, for the kernels that move it.
        workspace: memory and plan of the decode kernel.
        step_variant: the slots of the step's requests, and its variant, which selects the CUDA graph.
        request_slots: request id -> slot of the runner's request table; the runner's own mapping.
        policies: eviction parameters by slot.
        lanes: owners of the lanes of heavy blocks, on the device; ``None``: heads cannot share slots.
    """

    # Of a prompt of 8,192 tokens a layer of an 8B model; of 16 requests' blocks of 16 tokens, all layers.
    read_bytes: int = 64 << 20
    together: int = 64

    kv_layers: KVLayers
    workspace: DecodeWorkspace
    step_variant: StepVariant
    request_slots: Mapping[str, int]
    policies: PolicySlots
    lanes: LaneTables | None = None
    _sharing: set[str] = field(default_factory=set)
    """Ids of the requests whose heads share slots."""
    _heavy_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For those of them that have evicted: their blocks with shared lanes, in the order of the list."""
    _captured: dict[Variant, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Which layers' attention each graph has, by identity: layers that share KV have one number."""

    def start(self, plan: StepPlan) -> None:
        """As the base class."""
        self.step_variant.slots = None
        self.policies.start(plan.policies)
        self._sharing.update(one for one, params in plan.policies.items() if params.shares_heads)

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop requests that leave the batch. Call it before the runner reuses their slots."""
        gone = list(request_ids)
        super().release(gone)
        self.policies.release(gone, self.request_slots)
        self._sharing.difference_update(gone)
        for request_id in gone:
            self._heavy_blocks.pop(request_id, None)

    def compact(self, evictions: Sequence[Eviction]) -> None:
        """As the base class; a request without heavy blocks left no longer has lanes."""
        super().compact(evictions)
        for one in evictions:
            if not one.heavy_blocks and self._heavy_blocks.pop(one.request_id, ()):
                self.policies.shared[self.request_slots[one.request_id]] = 0

    def rows(self, common: CommonAttentionMetadata) -> StepRows | None:
        """The rows of this batch, or ``None`` if no row evicts. Also sets the step's variant.

        Raises:
            AccountingError: some request evicts, and the runner does not say which requests the rows are, or
                vLLM says otherwise.
        """
        rows, slots, told = None, self.step_variant.slots, common.req_idx
        if self.in_step and self.policies.any_evicts:
            if slots is None or (told is not None and not np.array_equal(told, slots)):
                raise AccountingError(
                    "vLLM's model runner did not say which requests are in the batch, of which some evict: "
                    "attention would read their freed blocks. A runner's prepare_attn has to call ours"
                )
            self.policies.place(self.request_slots)
            evicts = self.policies.evicts[slots]
            if evicts.any():
                assert common.seq_lens_cpu_upper_bound is not None
                # Exact, as speculative decoding is refused.
                seq_lens = common.seq_lens_cpu_upper_bound.numpy()
                rows = StepRows.of(
                    evicts,
                    common.query_start_loc_cpu.numpy(),
                    seq_lens,
                    self.policies.first_scored[slots],
                )
        shares = rows is not None and self.shared_blocks(common) is not None
        self.step_variant.current = variant_of(rows, self.step_variant.captured, shares=shares)
        return rows

    @property
    def _slots(self) -> NDArray[np.intp]:
        slots = self.step_variant.slots
        assert slots is not None, "rows() was asked first"
        return slots

    def shared_blocks(self, common: CommonAttentionMetadata) -> NDArray[np.int32] | None:
        """Number of blocks with shared slots of each row, [B]; ``None`` if no row has any."""
        if not self._heavy_blocks:
            return None
        shared = np.zeros(common.num_reqs, dtype=np.int32)
        shared[: len(self._slots)] = self.policies.shared[self._slots]
        return shared if shared.any() else None

    def lane_rows(
        self, common: CommonAttentionMetadata, shared: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """The value of :attr:`.LaneTables.rows` for this batch, [B, 3]."""
        rows = np.zeros((common.num_reqs, 3), dtype=np.int32)
        rows[:, 0] = -1
        sharing = np.flatnonzero(shared)
        slots = self._slots[sharing]
        pinned = self.policies.pinned[slots] // self.block_size
        rows[sharing] = np.stack([slots, pinned, shared[sharing]], axis=1)
        return rows

    def punched(self, request_id: str, count: int) -> None:
        """Note that ``count`` blocks leave a request's block table. Unknown ids are ignored."""
        slot = self.request_slots.get(request_id)
        if slot is not None:
            self.policies.holes[slot] += count

    def live_lens(self, common: CommonAttentionMetadata) -> NDArray[np.int32]:
        """Live length of each row, on the host, [B], int32; of a row that does not evict its length."""
        assert common.seq_lens_cpu_upper_bound is not None
        live: NDArray[np.int32] = common.seq_lens_cpu_upper_bound.numpy().copy()
        live[: len(self._slots)] -= self.policies.holes[self._slots] * self.block_size
        return live

    def pinned_tokens(self, common: CommonAttentionMetadata) -> NDArray[np.int32]:
        """Tokens in pinned blocks of each row, [B], int32; 0 for padding and for rows that do not evict."""
        pinned = np.zeros(common.num_reqs, dtype=np.int32)
        pinned[: len(self._slots)] = self.policies.pinned[self._slots]
        return pinned

    def note_served(self, batch: ScoredBatch, attention: object) -> None:
        """Note that a layer's attention ran for a batch with budgets, if a graph is being captured."""
        if batch.capturing:
            self._captured[batch.variant].add(id(attention))

    def layers_captured(self, variant: Variant) -> int:
        """Number of layers that called our kernels while this variant was captured."""
        return len(self._captured[variant])

    def to_device(self, data: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """``data`` on the device; the host does not wait."""
        return async_tensor_h2d(data, device=self.scores.device)

    def _reset(self, scores: torch.Tensor, slots: torch.Tensor) -> None:
        kernels.reset_scores(scores, slots)

    @staticmethod
    def key_value_views_of(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base class."""
        keys, values = pages.chunk(2, dim=-1)
        return keys, values

    def _move_tokens(self, evictions: Sequence[Eviction]) -> None:
        equal, shared = list[kernels.Compaction](), list[kernels.Compaction]()
        for one in evictions:
            if one.request_id in self._sharing:
                slot = self.request_slots[one.request_id]
                blocks = (one.heavy_blocks, one.doomed_blocks, one.fresh_blocks)
                shared.append(kernels.Compaction(*blocks, slot))
                self._heavy_blocks[one.request_id] = one.heavy_blocks
                self.policies.shared[slot] = len(one.heavy_blocks)
                self.policies.pinned[slot] = max(self.policies.pinned[slot], one.pinned)
            else:
                equal.append(kernels.Compaction(one.heavy_blocks, one.doomed_blocks))
        for some, lanes in ((equal, None), (shared, self.lanes)):
            for together in kernels.by_size(some, self.block_size):
                packed = kernels.Evictions.pack(together, self.scores.device)
                kernels.compact(self.kv_layers, self.scores, packed, lanes)
