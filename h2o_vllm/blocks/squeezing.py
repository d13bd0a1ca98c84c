# SPDX-License-Identifier: Apache-2.0
"""A block manager that takes blocks back from elastic requests when others need them. Engine core.

Which of them yield is the rule of :mod:`h2o_vllm.blocks.squeeze`; here is what may be taken at all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from h2o_vllm.blocks.beside import LimitedManager
from h2o_vllm.blocks.eviction_state import EvictionIndices, EvictionState
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.blocks.squeeze import SqueezeCounts, SqueezeRules, Victim, choose_victims

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

__all__ = ["SqueezingManager"]


class SqueezingManager(FullAttentionManager):
    """Knows the requests that are followed, and squeezes elastic ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eviction_states: dict[str, EvictionState] = {}
        self._evictions: dict[str, Eviction] = {}
        self._elastic: dict[str, EvictionState] = {}
        self._running: tuple[str, ...] = ()
        self._rules = SqueezeRules()
        self._beside: tuple[LimitedManager, ...] = ()
        self._squeezes = SqueezeCounts()

    @abstractmethod
    def _evict(self, request_id: str, state: EvictionState, indices: EvictionIndices) -> None:
        """Free what is doomed, and remember it for the workers."""

    def follow_rules(self, rules: SqueezeRules, beside: Sequence[LimitedManager] = ()) -> None:
        """Say when to squeeze; ``beside``: the other managers, which take blocks from the same pool."""
        self._rules, self._beside = rules, tuple(beside)
        for manager in self._beside:
            manager.limit(self._has_evicted)

    def begin_step(self, running: Sequence[Request]) -> None:
        """Set the requests that this step may squeeze: ``running`` ones, whose tables the workers have."""
        if self._elastic:
            self._running = tuple(request.request_id for request in running)

    def take_squeezes(self) -> SqueezeCounts:
        """Drain the counts of squeezes since the last call."""
        counts, self._squeezes = self._squeezes, SqueezeCounts()
        return counts

    def _has_evicted(self, request_id: str) -> bool:
        state = self._eviction_states.get(request_id)
        return state is not None and state.holes > 0

    def _squeeze_for(
        self, request_id: str, hits: Sequence[KVCacheBlock], needed: int, *, admitting: bool
    ) -> None:
        """Squeeze elastic requests if too few blocks are free, and if that covers the difference."""
        missing = needed - self.block_pool.get_num_free_blocks()
        if missing > 0:
            victims = choose_victims(self._victims(request_id, hits), missing)
            for victim in victims:
                self._squeeze(victim)
            self._squeezes.preemptions_avoided += bool(victims) and not admitting

    def _victims(self, request_id: str, hits: Sequence[KVCacheBlock]) -> list[Victim]:
        """The requests that can be squeezed for ``request_id``, which is about to share ``hits``."""
        by_priority = self._rules.by_priority
        least = self._eviction_states[request_id].counts.priority
        wanted = {block.block_id for block in hits}
        read = frozenset[int]().union(*(one.ranked_blocks for one in self._evictions.values()))
        victims = []
        for other in self._running:
            state, table = self._elastic.get(other), self.req_to_blocks.get(other)
            if state is None or not table or (by_priority and state.counts.priority < least):
                continue
            indices = state.excess(state.counts.num_computed_tokens)
            if indices is None or not self._yields(state, indices, table, wanted, read):
                continue
            if not self._yields_beside(other, state, wanted):
                continue
            gain = sum(table[index].ref_cnt == 1 for index in indices.doomed)
            if gain:
                priority = state.counts.priority if by_priority else 0
                victims.append(Victim(other, state, gain, priority))
        return victims

    def _yields(
        self,
        state: EvictionState,
        indices: EvictionIndices,
        table: Sequence[KVCacheBlock],
        wanted: set[int],
        read: frozenset[int],
    ) -> bool:
        """Whether a squeeze takes no block that other requests hold or are about to hold (``wanted``).

        Nor have given back in this step, in which they still ``read`` it. Who is not stock shares what nobody
        writes, and nothing else.
        """
        if not state.stock:
            return True
        withdrawn = self._withdrawn(state, indices, table)
        if any(block.ref_cnt > 1 or block.block_id in read for block in withdrawn):
            return False
        lost = (*withdrawn, *(table[index] for index in indices.doomed))
        return wanted.isdisjoint(block.block_id for block in lost)

    def _yields_beside(self, request_id: str, state: EvictionState, wanted: set[int]) -> bool:
        """The same of the other groups: others hold, or may be about to hold, what this step fills."""
        filled = self._published_beside(request_id, state)
        return not filled or not (wanted or any(block.ref_cnt > 1 for block in filled))

    def _published_beside(self, request_id: str, state: EvictionState) -> list[KVCacheBlock]:
        """What the other groups have published of this step's tokens."""
        computed = state.counts.num_computed_tokens
        return [
            block
            for manager in self._beside
            for block in manager.published_from(request_id, computed)
        ]

    def _withdrawn(
        self, state: EvictionState, indices: EvictionIndices, table: Sequence[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """What a squeezed stock request takes out of the cache, beside what it gives back.

        Blocks that evictions may write, or the one whose next token comes after the first eviction: vLLM may
        have published it in this step.
        """
        first = state.pinned
        if not state.policy.moves_tokens:
            first = state.counts.num_computed_tokens // self.block_size
        doomed = {*indices.doomed}
        return [table[index] for index in range(first, len(table)) if index not in doomed]

    def _squeeze(self, victim: Victim) -> None:
        request_id, state = victim.request_id, victim.state
        was_stock = state.stock
        indices = state.squeeze(state.counts.num_computed_tokens)
        assert indices is not None
        withdrawn = self._published_beside(request_id, state)
        if was_stock:
            withdrawn += self._withdrawn(state, indices, self.req_to_blocks[request_id])
        self.block_pool.evict_blocks(
            {block.block_id for block in withdrawn if block.block_hash is not None}
        )
        self._evict(request_id, state, indices)
        self._squeezes.requests += 1
        self._squeezes.blocks += victim.gain
