# SPDX-License-Identifier: Apache-2.0
"""The worker's state on GPUs: requests by slot, kernels of :mod:`h2o_vllm.kernels.triton`. Worker process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.engine.cuda.variants import StepVariant, Variant, variant_of
from h2o_vllm.engine.rows import StepRows
from h2o_vllm.engine.state import WorkerState
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.blocks.plan import Eviction, EvictionParams
    from h2o_vllm.engine.cuda.batch import ScoredBatch
    from h2o_vllm.engine.cuda.slots import PolicySlots
    from h2o_vllm.kernels.triton import DecodeWorkspace, KVLayers

__all__ = ["CudaState"]


@dataclass(kw_only=True)
class CudaState(WorkerState):
    """Scores and their bookkeeping.

    Attributes:
        kv_layers: where the KV of the evictable layers lies.
        workspace: memory and plan of the decode kernel.
        step_variant: which kernels the step uses; read when a CUDA graph is chosen.
        request_slots: request id -> slot of the runner's request table; the runner's own mapping.
        policies: policies of those slots.
    """

    kv_layers: KVLayers
    workspace: DecodeWorkspace
    step_variant: StepVariant
    request_slots: Mapping[str, int]
    policies: PolicySlots
    _captured: dict[Variant, set[int]] = field(default_factory=lambda: defaultdict(set))

    def start(self, policies: Mapping[str, EvictionParams]) -> None:
        """Learn what the requests that evict and enter the batch depend on."""
        self.policies.start(policies)

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop requests that leave the batch, before the runner reuses their slots."""
        self.policies.release(request_ids, self.request_slots)

    def rows(self, common: CommonAttentionMetadata) -> StepRows | None:
        """Who evicts in this batch, or ``None`` if nobody does; also settles the step's variant."""
        rows = None
        if self.in_step and common.req_idx is not None:
            self.policies.place(self.request_slots)
            codes = self.policies.codes(common.req_idx)
            if codes is not None:
                assert common.seq_lens_cpu_upper_bound is not None
                # Exact without speculative decoding, which is refused.
                seq_lens = common.seq_lens_cpu_upper_bound.numpy()
                rows = StepRows.of(
                    codes,
                    common.query_start_loc_cpu.numpy(),
                    seq_lens,
                    self.policies.prompt_tokens(common.req_idx),
                    self.policies.sinks(common.req_idx),
                )
        self.step_variant.current = variant_of(rows, self.step_variant.captured)
        return rows

    def punched(self, request_id: str, count: int) -> None:
        """``count`` blocks of a request are leaving its block table. Unknown ids are fine."""
        slot = self.request_slots.get(request_id)
        if slot is not None:
            self.policies.punched(slot, count)

    def live_lens(self, common: CommonAttentionMetadata) -> NDArray[np.int32]:
        """Live length of each row that evicts, on the host, [B], int32; the others have any number."""
        assert common.req_idx is not None and common.seq_lens_cpu_upper_bound is not None
        live: NDArray[np.int32] = common.seq_lens_cpu_upper_bound.numpy().copy()
        live[: len(common.req_idx)] -= self.policies.holes(common.req_idx) * self.block_size
        return live

    def pinned_tokens(self, common: CommonAttentionMetadata) -> NDArray[np.int32]:
        """Tokens in pinned blocks of each row, [B], int32; 0 of padding, and of rows that do not evict."""
        assert common.req_idx is not None
        pinned = np.zeros(common.num_reqs, dtype=np.int32)
        pinned[: len(common.req_idx)] = self.policies.pinned(common.req_idx)
        return pinned

    def clear_scores(
        self, table: torch.Tensor, live: torch.Tensor, rows: torch.Tensor, max_len: int
    ) -> None:
        """Drop what earlier queries gave to some rows' tokens; see :func:`.kernels.clear_scores`."""
        kernels.clear_scores(self.scores, table, live, rows, max_len)

    def split_scores(
        self, table: torch.Tensor, live: torch.Tensor, rows: torch.Tensor, max_len: int
    ) -> None:
        """Of some rows' tokens, make ``early`` what it is; see :func:`.kernels.split_scores`."""
        kernels.split_scores(self.scores, self.early, table, live, rows, max_len)

    def note_served(self, batch: ScoredBatch, layer: int) -> None:
        """A layer's attention ran for a batch with budgets; remembers what was captured."""
        if batch.capturing:
            self._captured[batch.variant].add(layer)

    def layers_captured(self, variant: Variant) -> int:
        """How many evictable layers called our kernels while this variant was captured."""
        return len(self._captured[variant])

    def _to_device(self, data: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        return async_tensor_h2d(data, device=self.scores.device)

    def _reset(
        self, scores: torch.Tensor, slots: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        kernels.reset_scores(scores, slots, values)

    def _adjust_scores(self, evictions: Sequence[Eviction]) -> None:
        packed = kernels.Rescores.pack(list(map(rescore_of, evictions)), self.scores.device)
        kernels.rescore(self.kv_layers, self.scores, self.early, packed)

    def _move_tokens(self, evictions: Sequence[Eviction]) -> None:
        pairs = [(eviction.heavy_blocks, eviction.doomed_blocks) for eviction in evictions]
        packed = kernels.Evictions.pack(pairs, self.scores.device)
        kernels.compact(self.kv_layers, self.scores, packed)
