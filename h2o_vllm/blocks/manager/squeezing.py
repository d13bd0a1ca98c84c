# SPDX-License-Identifier: Apache-2.0
"""A block manager that squeezes elastic requests when others need their blocks. Engine core.

This module finds the requests that can be squeezed. :mod:`h2o_vllm.blocks.counts.squeeze` chooses among them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.counts.request_state import RequestState
from h2o_vllm.blocks.counts.squeeze import (
    SqueezeCounts,
    SqueezeRules,
    Victim,
    choose_victims,
)
from h2o_vllm.blocks.counts.timeline import EvictionIndices
from h2o_vllm.blocks.manager.other_groups import LimitedManager, published_from
from h2o_vllm.blocks.plan import Eviction

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class SqueezingManager(FullAttentionManager):
    """Keeps the states of tracked requests, and squeezes elastic ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eviction_states: dict[str, RequestState] = {}
        self._evictions: dict[str, Eviction] = {}
        self._elastic: dict[str, EvictionState] = {}
        self._promising: dict[str, RequestState] = {}
        self._running: tuple[str, ...] = ()
        self._rules = SqueezeRules()
        self._other_groups: tuple[LimitedManager, ...] = ()
        self._squeezes = SqueezeCounts()

    @abstractmethod
    def _evict(self, request_id: str, state: EvictionState, indices: EvictionIndices) -> None:
        """Free the doomed blocks, and note the eviction for the workers."""

    def set_rules(self, rules: SqueezeRules, others: Sequence[LimitedManager] = ()) -> None:
        """Set when to squeeze, and the other managers that share the pool (``others``)."""
        self._rules, self._other_groups = rules, tuple(others)
        for manager in self._other_groups:
            manager.limit(self._eviction_states)

    def begin_step(self, running: Sequence[Request]) -> None:
        """Set the requests that this step may squeeze: the ``running`` ones. Workers hold their tables."""
        if self._elastic:
            self._running = tuple(request.request_id for request in running)

    def take_squeezes(self) -> SqueezeCounts:
        """Return the counts of squeezes since the last call, and reset them."""
        counts, self._squeezes = self._squeezes, SqueezeCounts()
        return counts

    def promised_blocks(self, request_id: str) -> int:
        """Blocks that the bounded prompts of other running requests will hold, and do not hold yet.

        A bounded prompt holds few blocks while it is computed. If a new request took the rest, the prompt
        would be preempted, and computed again from its start.
        """
        promised = 0
        for other, state in self._promising.items():
            if other != request_id and (table := self.req_to_blocks.get(other)):
                live = len(table) - state.holes
                promised += max(0, self._promise(state) - live)
        return promised

    def _promise(self, state: RequestState) -> int:
        return -(-state.promised_tokens // self.block_size)

    def _squeeze_for(
        self, request_id: str, hits: Sequence[KVCacheBlock], needed: int, *, admitting: bool
    ) -> None:
        """If fewer than ``needed`` blocks are free, and squeezes can free the missing ones, squeeze."""
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
            if not self._others_yield(other, state, wanted):
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
        """Whether a squeeze changes no block that another request uses.

        That is: no block that others hold or are about to hold (``wanted``), and no block that an eviction of
        this step ``read``. A request that is not stock shares only blocks that are never written.
        """
        if not state.stock:
            return True
        withdrawn = self._withdrawn(state, indices, table)
        if any(block.ref_cnt > 1 or block.block_id in read for block in withdrawn):
            return False
        lost = (*withdrawn, *(table[index] for index in indices.doomed))
        return wanted.isdisjoint(block.block_id for block in lost)

    def _others_yield(self, request_id: str, state: EvictionState, wanted: set[int]) -> bool:
        """The same for the other groups: no other request may use the blocks that this step fills."""
        filled = self._published_by_others(request_id, state)
        return not filled or not (wanted or any(block.ref_cnt > 1 for block in filled))

    def _published_by_others(self, request_id: str, state: EvictionState) -> list[KVCacheBlock]:
        """Blocks with tokens of this step that the other groups have published."""
        computed = state.counts.num_computed_tokens
        return [
            block
            for manager in self._other_groups
            for block in published_from(manager, request_id, computed)
        ]

    def _withdrawn(
        self, state: EvictionState, indices: EvictionIndices, table: Sequence[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Blocks that a squeezed stock request removes from the prefix cache, beside the doomed ones.

        If the policy moves tokens, these are the blocks that evictions may write. Else it is the block of the
        first token after the first eviction: vLLM may have published it in this step.
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
        withdrawn = self._published_by_others(request_id, state)
        if was_stock:
            withdrawn += self._withdrawn(state, indices, self.req_to_blocks[request_id])
        self.block_pool.evict_blocks(
            {block.block_id for block in withdrawn if block.block_hash is not None}
        )
        self._evict(request_id, state, indices)
        self._squeezes.requests += 1
        self._squeezes.blocks += victim.gain
