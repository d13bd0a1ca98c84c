# SPDX-License-Identifier: Apache-2.0
"""What a worker knows about budgets: who is scored, the scores, the KV they belong to.

Runs in each worker process; one instance per worker, shared with the metadata builder. No vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from h2o_vllm.engine.cpu.rows import EvictionParams
from h2o_vllm.engine.eviction_scores import candidate_blocks, cleared, eviction_scores
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu.batch import key_value_views
from h2o_vllm.policy import Policy, get_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from h2o_vllm.blocks import plan
    from h2o_vllm.blocks.plan import Eviction

__all__ = ["WorkerState"]


@dataclass
class WorkerState:
    """Scores and their bookkeeping.

    Attributes:
        kv_caches: KV of each evictable layer, ``[N, KH, BS, 2 * D]``.
        scores: ``[L, N, KH, BS]``, float32; see :mod:`h2o_vllm.kernels`.
        kv_cache_group: index of vLLM's KV cache group whose layers these are.
        first_kv_head: global index of this rank's first KV head.
        row_request_ids: request id of each row of the batch being prepared.
        policies: request id -> policy and what it depends on, for the requests that evict.
        in_step: whether a real step (not a warm-up) is being executed.
    """

    kv_caches: list[torch.Tensor]
    scores: torch.Tensor
    kv_cache_group: int
    first_kv_head: int
    row_request_ids: Callable[[], Sequence[str]]
    policies: dict[str, EvictionParams] = field(default_factory=dict)
    in_step: bool = False

    def warm_up(self, num_heads: int) -> None:
        """Run every kernel once on scratch memory: building or compiling them takes seconds, which
        must not be the first request's."""
        _, num_kv_heads, block_size, width = self.kv_caches[0].shape
        kv_cache = torch.zeros(3, num_kv_heads, block_size, width, dtype=self.kv_caches[0].dtype)
        scores = torch.zeros(1, 3, num_kv_heads, block_size)
        query = torch.zeros(2, num_heads, width // 2, dtype=kv_cache.dtype)
        one, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        first, table = torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
        lens = torch.tensor([2], dtype=torch.int32)
        batch = kernels.PagedBatch(query, kv_cache, scores[0], table, lens)
        kernels.attend_decode(batch, first, first, 1.0, torch.empty_like(query))
        kernels.attend_prompt(batch, starts, first, 1.0, torch.empty_like(query))
        kernels.score_prompt(batch, starts, first, 1.0)
        kernels.compact([kv_cache], scores, one, one + 1)
        kernels.reset_scores(scores, one.long())

    def start(self, policies: Mapping[str, plan.EvictionParams]) -> None:
        """Learn the policies of the requests that enter the batch."""
        for request_id, terms in policies.items():
            self.policies[request_id] = EvictionParams.of(terms)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop finished requests. Unknown ids are fine."""
        for request_id in request_ids:
            self.policies.pop(request_id, None)

    def compact(self, eviction: Eviction) -> None:
        """Move the survivors of the doomed blocks into the heavy ones, in every layer and head.

        The policy may adjust the scores first. Must run before the forward pass of the step that
        carries the eviction, and in the order of the step's evictions.
        """
        if not eviction.heavy_blocks:
            return
        policy = get_policy(eviction.policy)
        if policy.scores_at_eviction:
            blocks = torch.tensor(candidate_blocks(eviction))
            keys, values = partial(self._keys, blocks), partial(self._values, blocks)
            eviction_scores(policy, eviction, self.scores, blocks, keys, values)
        kernels.compact(
            self.kv_caches,
            self.scores,
            torch.tensor(eviction.heavy_blocks, dtype=torch.int32),
            torch.tensor(eviction.doomed_blocks, dtype=torch.int32),
        )

    def start_scores(self, policy: Policy, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Give new tokens the score they start with.

        Args:
            positions: logical positions, [T], int64.
            slots: where their KV goes, ``block_id * BS + offset``, [T], int64.
        """
        layers, _, heads, _ = self.scores.shape
        values = policy.initial_scores(positions, layers, heads, self.first_kv_head)
        kernels.reset_scores(self.scores, slots, values)

    def protect(self, slots: torch.Tensor) -> None:
        """Rank first tokens above all others, for as long as they live.

        Args:
            slots: where their KV goes, [T], int64.
        """
        layers, _, heads, _ = self.scores.shape
        highest = torch.full((layers, heads, slots.numel()), float("inf"))
        kernels.reset_scores(self.scores, slots, highest)

    def clear_scores(self, blocks: torch.Tensor) -> None:
        """Drop what earlier queries gave to the tokens in some blocks, [n], int."""
        blocks = blocks.long()
        self.scores[:, blocks] = cleared(self.scores[:, blocks])

    def _keys(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """[KH, D, C] of the tokens in ``blocks``."""
        keys, _ = key_value_views(self.kv_caches[layer])
        return keys[blocks].permute(1, 2, 0, 3).flatten(2)

    def _values(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """[KH, n, BS, D] of the tokens in n ``blocks``."""
        _, values = key_value_views(self.kv_caches[layer])
        return values[blocks].transpose(0, 1)
