# SPDX-License-Identifier: Apache-2.0
"""What a GPU worker knows about budgets: who is scored, the scores, the KV they belong to.

One instance per worker, shared with the metadata builder and the attention layers. Nothing in here
waits for the device: with async scheduling the worker runs ahead of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from h2o_vllm.engine.cuda.rows import PolicySlots, StepRows, StepVariant, Variant
from h2o_vllm.engine.eviction_scores import candidate_blocks, eviction_scores
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.policy import get_policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.blocks.plan import Eviction
    from h2o_vllm.engine.cuda.batch import ScoredBatch
    from h2o_vllm.kernels.triton import DecodeWorkspace, KVLayers
    from h2o_vllm.policy import Policy

__all__ = ["CudaState"]


@dataclass
class CudaState:
    """Scores and their bookkeeping.

    Attributes:
        kv_layers: where the KV of the evictable layers lies.
        scores: ``[L, N, KH, BS]``, float32.
        workspace: memory and plan of the decode kernel.
        kv_cache_group: index of vLLM's KV cache group whose layers these are.
        first_kv_head: global index of this rank's first KV head.
        step_variant: which kernels the step uses; read when a CUDA graph is chosen.
        request_slots: request id -> slot of the runner's request table; the runner's own mapping.
        policies: policies of those slots.
        in_step: whether a real step (not a warm-up) is being executed.
    """

    kv_layers: KVLayers
    scores: torch.Tensor
    workspace: DecodeWorkspace
    kv_cache_group: int
    first_kv_head: int
    step_variant: StepVariant
    request_slots: Mapping[str, int]
    policies: PolicySlots
    in_step: bool = False
    _captured: dict[Variant, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.scores.shape[3]

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
        self.step_variant.current = Variant.STOCK if rows is None else rows.variant
        return rows

    def compact(self, evictions: Sequence[Eviction]) -> None:
        """Move the survivors of the doomed blocks into the heavy ones, in every layer and head.

        Policies may adjust the scores first. Must run before the forward pass of the step that
        carries the evictions. Their order does not matter: a heavy block belongs to its request since
        before the step, so no other eviction of the step has doomed it.
        """
        pairs = [(one.heavy_blocks, one.doomed_blocks) for one in evictions if one.heavy_blocks]
        for eviction in evictions:
            if eviction.heavy_blocks:
                self._score_candidates(eviction)
        if pairs:
            packed = kernels.Evictions.pack(pairs, self.scores.device)
            kernels.compact(self.kv_layers, self.scores, packed)

    def start_scores(
        self,
        policy: Policy,
        positions: NDArray[np.int64],
        slot_mapping: torch.Tensor,
        tokens: NDArray[np.int64] | None,
    ) -> None:
        """Give new tokens the score they start with.

        Args:
            positions: logical positions, [T]. tokens: their places in the batch, [T], or ``None`` for
                its first T, which saves a copy to the device.
            slot_mapping: where the batch's KV goes, ``block_id * BS + offset``, int64, on the device.
        """
        layers, _, heads, _ = self.scores.shape
        values = policy.initial_scores(
            torch.from_numpy(positions), layers, heads, self.first_kv_head
        )
        if values is not None:
            values = async_tensor_h2d(values, device=self.scores.device)
        if tokens is None:
            slots = slot_mapping[: len(positions)]
        else:
            slots = slot_mapping[async_tensor_h2d(tokens, device=self.scores.device)]
        kernels.reset_scores(self.scores, slots, values)

    def protect(self, slot_mapping: torch.Tensor, tokens: NDArray[np.int64]) -> None:
        """Rank first tokens above all others, for as long as they live.

        Args:
            slot_mapping, tokens: as for :meth:`start_scores`.
        """
        layers, _, heads, _ = self.scores.shape
        highest = self.scores.new_full((layers, heads, len(tokens)), float("inf"))
        slots = slot_mapping[async_tensor_h2d(tokens, device=self.scores.device)]
        kernels.reset_scores(self.scores, slots, highest)

    def clear_scores(
        self, table: torch.Tensor, live: torch.Tensor, rows: torch.Tensor, max_len: int
    ) -> None:
        """Drop what earlier queries gave to some rows' tokens; see :func:`.kernels.clear_scores`."""
        kernels.clear_scores(self.scores, table, live, rows, max_len)

    def _score_candidates(self, eviction: Eviction) -> None:
        policy = get_policy(eviction.policy)
        if not policy.scores_at_eviction:
            return
        ids = np.array(candidate_blocks(eviction), dtype=np.int64)
        blocks = async_tensor_h2d(ids, device=self.scores.device)

        def keys(layer: int) -> torch.Tensor:
            return self.kv_layers.key_caches[layer][blocks].permute(2, 3, 0, 1).flatten(2)

        def values(layer: int) -> torch.Tensor:
            return self.kv_layers.value_caches[layer][blocks].permute(2, 0, 1, 3)

        eviction_scores(policy, eviction, self.scores, blocks, keys, values)

    def note_served(self, batch: ScoredBatch, layer: int) -> None:
        """A layer's attention ran for a batch with budgets; remembers what was captured."""
        if batch.capturing:
            self._captured[batch.variant].add(layer)

    def layers_captured(self, variant: Variant) -> int:
        """How many evictable layers called our kernels while this variant was captured."""
        return len(self._captured[variant])
