# SPDX-License-Identifier: Apache-2.0
"""vLLM's block manager, taught to free blocks in the middle. Runs in the engine core.

``KVCacheManager.allocate_slots`` calls, in this order and for every scheduled request::

    remove_skipped_blocks    we free what the budget no longer covers
    allocate_new_blocks      the freed blocks can already be handed out here
    cache_blocks             we withhold blocks that an eviction may write, or that depend on one

and ``free`` when the request is preempted or done. Nothing else is overridden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.blocks.ledger import check_pool, check_private
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.config import RequestBudget

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

__all__ = ["H2OBlockManager"]


class H2OBlockManager(FullAttentionManager):
    """Frees the blocks that hold low-score tokens, from counts alone.

    Which tokens those are is the workers' business; see :mod:`h2o_vllm.engine.worker`. Requests
    that were never handed to :meth:`track` are managed exactly as by the base class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eviction_states: dict[str, EvictionState] = {}
        self._evictions: dict[str, Eviction] = {}
        self._final_reports: dict[str, dict[str, object]] = {}

    def track(self, request: Request, budget: RequestBudget, max_model_len: int) -> EvictionState:
        """Begin to follow a request. Must precede the request's first allocation."""
        state = EvictionState(request, budget, self.block_size, max_model_len)
        self._eviction_states[request.request_id] = state
        return state

    def eviction_state(self, request_id: str) -> EvictionState | None:
        """A request's state, if it is tracked."""
        return self._eviction_states.get(request_id)

    def take_evictions(self) -> tuple[Eviction, ...]:
        """Drain this step's evictions: at most one per request."""
        evictions, self._evictions = tuple(self._evictions.values()), {}
        return evictions

    def take_final_reports(self) -> dict[str, dict[str, object]]:
        """Drain the reports of the requests that ended since the last call."""
        reports, self._final_reports = self._final_reports, {}
        return reports

    def check_integrity(self, *, idle: bool = False) -> None:
        """See :func:`h2o_vllm.blocks.ledger.check_pool`. Assumes no other manager in the pool."""
        check_pool(self.block_pool, self.req_to_blocks, idle=idle)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what the request's budget no longer covers, and remember it for the workers.

        Decides on ``num_computed_tokens``, not on the processed count that vLLM passes: workers
        run steps in order and compact before the forward pass, so blocks that a step in flight
        still reads are safe, and the moment of an eviction does not depend on scheduling.
        """
        del processed_computed_tokens, num_prompt_tokens
        state = self._eviction_states.get(request_id)
        if state is None or not state.evicts:
            return
        seen = state.counts.num_computed_tokens
        split = state.evict(seen)
        if split is None:
            return
        table = self.req_to_blocks[request_id]
        heavy = [table[index] for index in split.heavy]
        doomed = [table[index] for index in split.doomed]
        fresh = tuple(table[index].block_id for index in split.fresh)
        if state.policy.moves_tokens:
            check_private([*heavy, *doomed])
        if self.enable_caching:
            # While the table still has them. Of a token that is still to be sampled there is no hash yet.
            known = min(seen, state.counts.num_tokens)
            self.cache_blocks(state.counts, known, replay_boundaries=())
        for index in split.doomed:
            table[index] = self.block_pool.null_block
        # Tail first, as everywhere in vLLM: the front of a prompt is the likeliest to be shared.
        self.block_pool.free_blocks(reversed(doomed))
        self._evictions[request_id] = Eviction(
            request_id=request_id,
            heavy_blocks=tuple(block.block_id for block in heavy),
            doomed_blocks=tuple(block.block_id for block in doomed),
            holes=split.doomed,
            policy=state.budget.policy,
            fresh_blocks=fresh,
            fresh_from=split.fresh.start * self.block_size,
            seen=seen,
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As the base class; keeps the high-water mark."""
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        state = self._eviction_states.get(request_id)
        if state is not None and blocks:
            live = len(self.req_to_blocks[request_id]) - state.holes
            state.peak_blocks = max(state.peak_blocks, live)
        return blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """As the base class, for the part of the sequence that may be shared."""
        state = self._eviction_states.get(request.request_id)
        if state is not None:
            num_tokens = state.publishable_tokens(num_tokens)
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As the base class. Cancels a pending eviction, and drops the finished."""
        self._evictions.pop(request_id, None)
        state = self._eviction_states.get(request_id)
        if state is not None:
            if state.counts.is_finished():
                self._final_reports[request_id] = state.report()
                del self._eviction_states[request_id]
            else:
                state.release()
        return super().pop_blocks_for_free(request_id)
