# SPDX-License-Identifier: Apache-2.0
"""Squeezes elastic requests when others need their blocks. Engine core.

This module finds the requests that can be squeezed. :mod:`h2o_vllm.blocks.counts.squeeze` chooses among them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.counts.split import EvictionIndices
from h2o_vllm.blocks.counts.squeeze import SqueezeCounts, SqueezeRules, Victim, choose_victims
from h2o_vllm.blocks.manager.other_groups import LimitedManager, published_from

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from h2o_vllm.blocks.counts.request_state import RequestState
    from h2o_vllm.blocks.plan import Eviction


class EvictingManager(FullAttentionManager):
    """What squeezing and settling know of the block manager.

    Attributes:
        states: of the tracked requests. evictions: of this step. Both by request id.
        other_groups: managers of the layers that are not evicted; they share the pool.
    """

    states: dict[str, RequestState]
    evictions: dict[str, Eviction]
    other_groups: tuple[LimitedManager, ...]

    @abstractmethod
    def evict(self, request_id: str, state: EvictionState, indices: EvictionIndices) -> None:
        """Free the doomed blocks, and note the eviction for the workers."""

    @abstractmethod
    def reserved_blocks(self, request_id: str) -> int:
        """Blocks that bounded prompts of other running requests will hold, and do not hold yet."""


class Squeezer:
    """Squeezes the elastic requests of a block manager.

    Attributes:
        elastic: states of the elastic requests, squeezed ones included, from their arrival to their end.
        rules: when to squeeze.
    """

    def __init__(self, manager: EvictingManager) -> None:
        self._manager = manager
        self.elastic: dict[str, EvictionState] = {}
        self.rules = SqueezeRules()
        self._running: tuple[str, ...] = ()
        self._counts = SqueezeCounts()

    def begin_step(self, running: Iterable[str]) -> None:
        """Set the requests that this step may squeeze: the ``running`` ones. Workers hold their tables."""
        if self.elastic:
            self._running = tuple(running)

    def take_counts(self) -> SqueezeCounts:
        """Return the counts of squeezes since the last call, and reset them."""
        counts, self._counts = self._counts, SqueezeCounts()
        return counts

    def squeeze_for(
        self, request_id: str, hits: Sequence[KVCacheBlock], needed: int, *, admitting: bool
    ) -> None:
        """If fewer than ``needed`` blocks are free, and squeezes can free the missing ones, squeeze."""
        missing = needed - self._manager.block_pool.get_num_free_blocks()
        if missing > 0:
            victims = choose_victims(self._victims(request_id, hits), missing)
            for victim in victims:
                self._squeeze(victim)
            self._counts.preemptions_avoided += bool(victims) and not admitting

    def _victims(self, request_id: str, hits: Sequence[KVCacheBlock]) -> list[Victim]:
        """The requests that can be squeezed for ``request_id``, which is about to share ``hits``."""
        by_priority = self.rules.by_priority
        least = self._manager.states[request_id].counts.priority
        wanted = {block.block_id for block in hits}
        read = frozenset[int]().union(
            *(one.ranked_blocks for one in self._manager.evictions.values())
        )
        victims = []
        for other in self._running:
            state, table = self.elastic.get(other), self._manager.req_to_blocks.get(other)
            if state is None or not table or (by_priority and state.counts.priority < least):
                continue
            indices = state.excess(state.counts.num_computed_tokens)
            if indices is None or not self._can_squeeze(state, indices, table, wanted, read):
                continue
            if not self._other_groups_yield(other, state, wanted):
                continue
            gain = sum(table[index].ref_cnt == 1 for index in indices.doomed)
            if gain:
                priority = state.counts.priority if by_priority else 0
                victims.append(Victim(other, state, gain, priority))
        return victims

    def _can_squeeze(
        self,
        state: EvictionState,
        indices: EvictionIndices,
        table: Sequence[KVCacheBlock],
        wanted: set[int],
        read: frozenset[int],
    ) -> bool:
        """Whether a squeeze changes no block that another request uses.

        That is: no block that others hold or are about to hold (``wanted``), and no block that an eviction of
        this step ``read``. A request that is not stock shares only blocks that are never written.
        """
        if not state.stock:
            return True
        withdrawn = self._blocks_to_unpublish(state, indices, table)
        if any(block.ref_cnt > 1 or block.block_id in read for block in withdrawn):
            return False
        lost = (*withdrawn, *(table[index] for index in indices.doomed))
        return wanted.isdisjoint(block.block_id for block in lost)

    def _other_groups_yield(self, request_id: str, state: EvictionState, wanted: set[int]) -> bool:
        """The same for the other groups: no other request may use the blocks that this step fills."""
        filled = self._published_by_other_groups(request_id, state)
        return not filled or not (wanted or any(block.ref_cnt > 1 for block in filled))

    def _published_by_other_groups(
        self, request_id: str, state: EvictionState
    ) -> list[KVCacheBlock]:
        """Blocks with tokens of this step that the other groups have published."""
        computed = state.counts.num_computed_tokens
        return [
            block
            for manager in self._manager.other_groups
            for block in published_from(manager, request_id, computed)
        ]

    def _blocks_to_unpublish(
        self, state: EvictionState, indices: EvictionIndices, table: Sequence[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Blocks that a squeezed stock request removes from the prefix cache.

        If the policy moves tokens, these are the blocks that evictions may write, and all behind a protected
        end. Else it is the block of the first token after the first eviction: vLLM may have published it in
        this step.
        """
        first = state.pinned
        if not state.policy.moves_tokens:
            first = state.counts.num_computed_tokens // self._manager.block_size
        doomed = {index for index in indices.doomed if index < state.end.start}
        return [table[index] for index in range(first, len(table)) if index not in doomed]

    def _squeeze(self, victim: Victim) -> None:
        request_id, state = victim.request_id, victim.state
        was_stock = state.stock
        indices = state.squeeze(state.counts.num_computed_tokens)
        assert indices is not None
        withdrawn = self._published_by_other_groups(request_id, state)
        if was_stock:
            withdrawn += self._blocks_to_unpublish(
                state, indices, self._manager.req_to_blocks[request_id]
            )
        self._manager.block_pool.evict_blocks(
            {block.block_id for block in withdrawn if block.block_hash is not None}
        )
        self._manager.evict(request_id, state, indices)
        self._counts.requests += 1
        self._counts.blocks += victim.gain
