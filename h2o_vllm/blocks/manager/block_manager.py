# SPDX-License-Identifier: Apache-2.0
"""vLLM's block manager, extended to free blocks in the middle of a table. Runs in the engine core.

``KVCacheManager.allocate_slots`` calls these methods, in this order, for each scheduled request::

    remove_skipped_blocks         frees what the budget no longer covers, and settles segments; notes whose
                                  late queries begin
    get_num_blocks_to_allocate    vLLM counts the free blocks right after this call. If too few are free,
                                  held ones are freed here, and running elastic requests squeezed
    allocate_new_blocks           may already hand out the freed blocks
    cache_blocks                  withholds blocks that an eviction may write, or that depend on one

It calls ``free`` when the request is preempted or finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.counts.request_state import RequestState
from h2o_vllm.blocks.counts.settling_state import SettlingState
from h2o_vllm.blocks.counts.split import EvictionIndices
from h2o_vllm.blocks.counts.squeeze import SqueezeRules
from h2o_vllm.blocks.manager.other_groups import LimitedManager, withdraw_unfilled
from h2o_vllm.blocks.manager.pool_check import check_pool, check_private
from h2o_vllm.blocks.manager.settled import SettledBlocks
from h2o_vllm.blocks.manager.squeezing import EvictingManager, Squeezer
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.config.request_budget import RequestBudget

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class H2OBlockManager(EvictingManager):
    """Decides from counts alone how many blocks a request frees, and which.

    The workers choose which tokens survive, see :mod:`h2o_vllm.engine.worker.worker`. A request that was
    never passed to :meth:`track` is managed as by the base class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states, self.evictions, self.other_groups = {}, {}, ()
        self.squeezer = Squeezer(self)
        self.settled = SettledBlocks(self)
        self._reserving: dict[str, RequestState] = {}
        self._early: dict[str, list[int]] = {}
        """Of each request whose late queries begin in this step: ids of its blocks that were never ranked."""
        self._final_reports: dict[str, dict[str, object]] = {}
        self._settle_shortages = 0

    def set_rules(
        self, rules: SqueezeRules, others: Sequence[LimitedManager] = (), turn_seconds: float = 0.0
    ) -> None:
        """Set when to squeeze, and the other managers that share the pool.

        Args:
            turn_seconds: for how long settled blocks of an answer are kept for its next turn while other
                requests wait. With priority scheduling none are kept: priorities alone decide the order.
        """
        self.squeezer.rules, self.other_groups = rules, tuple(others)
        self.settled.answers.seconds = 0.0 if rules.by_priority else turn_seconds
        for manager in self.other_groups:
            manager.limit(self.states)

    def track(self, request: Request, budget: RequestBudget, max_model_len: int) -> RequestState:
        """Begin to manage a request's evictions. Call it before the request's first allocation."""
        counts = (budget, self.block_size, max_model_len)
        state: RequestState
        if budget.settle:
            state = settling = SettlingState(request, *counts)
            if state.evicts:
                self.settled.track(request.request_id, settling)
        else:
            state = evicting = EvictionState(request, *counts)
            if evicting.squeezable:
                self.squeezer.elastic[request.request_id] = evicting
        self.states[request.request_id] = state
        if state.reserved_tokens:
            self._reserving[request.request_id] = state
        return state

    def eviction_state(self, request_id: str) -> RequestState | None:
        """The state of a request, or ``None`` if it is not tracked."""
        return self.states.get(request_id)

    def begin_step(self, running: Sequence[Request]) -> None:
        """Note which requests this step may squeeze, and which compute prompts whose segments settle."""
        names = [request.request_id for request in running]
        self.squeezer.begin_step(names)
        self.settled.begin_step(names)

    def take_settle_shortages(self) -> int:
        """Return how often too few blocks were free for a segment that was due, and reset the count."""
        count, self._settle_shortages = self._settle_shortages, 0
        return count

    def take_evictions(self) -> tuple[Eviction, ...]:
        """Return the evictions of this step, at most one per request, and forget them."""
        evictions, self.evictions = tuple(self.evictions.values()), {}
        return evictions

    def take_early_blocks(self) -> tuple[int, ...]:
        """Return :attr:`.StepPlan.early_blocks` of this step, and forget them."""
        taken, self._early = self._early, {}
        return tuple(block for blocks in taken.values() for block in blocks)

    def take_final_reports(self) -> dict[str, dict[str, object]]:
        """Return the reports of the requests that ended since the last call, and forget them."""
        reports, self._final_reports = self._final_reports, {}
        return reports

    def check_integrity(self, *, idle: bool = False) -> None:
        """See :func:`h2o_vllm.blocks.manager.pool_check.check_pool`."""
        tables = [*self.req_to_blocks.items(), *self.settled.held()]
        for manager in self.other_groups:
            tables += manager.req_to_blocks.items()
        check_pool(self.block_pool, tables, idle=idle)

    def remove_skipped_blocks(self, request_id: str, *_: Any, **__: Any) -> None:
        """Free what the request's budget no longer covers, or settle the segment that is due.

        The decision depends on ``num_computed_tokens``, not on the processed count that vLLM passes, so the
        time of an eviction does not depend on scheduling. Blocks that a step in flight still reads are safe:
        workers run steps in order, and compact before the forward pass. A request that waits, also after a
        preemption, has computed nothing, so nothing is due; vLLM may ask once more for one that has ended.
        """
        state = self.states.get(request_id)
        if state is not None and state.counts.is_finished():
            return
        if isinstance(state, SettlingState):
            self._settle(request_id, state)
        elif isinstance(state, EvictionState) and state.evicts:
            computed = state.counts.num_computed_tokens
            indices = state.evict(computed)
            if indices is not None:
                self.evict(request_id, state, indices)
            first = state.early_from(computed)
            if first is not None:
                table = self.req_to_blocks[request_id]
                self._early[request_id] = [block.block_id for block in table[first:]]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *counts: Any,
        **options: Any,
    ) -> int:
        """As the base class; if fewer blocks are free, held ones are freed, then elastic requests squeezed.

        It acts because no other call has the number of tokens and the cache hit. vLLM counts the free blocks
        right after it.

        Returns:
            If a segment that is due lacks blocks: more than there are, so that vLLM preempts a request and
            asks again.
        """
        if self._lacks_room_to_settle(request_id):
            return self.block_pool.num_gpu_blocks
        count = partial(
            self._count_blocks, request_id, num_tokens, new_computed_blocks, *counts, **options
        )
        own, admitting = count(), not self.req_to_blocks.get(request_id)
        watermark = self.squeezer.rules.watermark_blocks if admitting else 0
        while self.settled.make_room(own + watermark):
            # The hit may have been held: now it is taken from the free blocks, and counts.
            own = count()
        if not self.squeezer.elastic or (admitting and not self.squeezer.rules.to_admit):
            return own
        needed = own + sum(
            # Their cache hits are not known here; none is assumed.
            manager.get_num_blocks_to_allocate(request_id, num_tokens, (), *counts, **options)
            for manager in self.other_groups
        )
        self.squeezer.squeeze_for(
            request_id, new_computed_blocks, needed + watermark, admitting=admitting
        )
        return own

    def _count_blocks(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *counts: Any,
        **options: Any,
    ) -> int:
        """As ``get_num_blocks_to_allocate`` of the base class. Changes nothing.

        To admit a request, vLLM asks for all known tokens. Then the result is the most that they ever hold at
        once, plus what running bounded prompts have not taken yet.
        """
        held, admits = num_tokens, bool(options.get("apply_admission_cap"))
        state = self.states.get(request_id)
        if admits and state is not None:
            held = max(state.peak_tokens(num_tokens), self._reserved(state) * self.block_size)
            # The base class counts a hit's null blocks as if each held tokens.
            held += sum(block.is_null for block in new_computed_blocks) * self.block_size
        own = super().get_num_blocks_to_allocate(
            request_id, held, new_computed_blocks, *counts, **options
        )
        return own + self.reserved_blocks(request_id) if admits else own

    def reserved_blocks(self, request_id: str) -> int:
        """See the base class.

        If a new request took these blocks, the prompt would be preempted, and computed again from its start.
        """
        reserved = 0
        for other, state in self._reserving.items():
            if other != request_id and (table := self.req_to_blocks.get(other)):
                live = len(table) - state.holes
                reserved += max(0, self._reserved(state) - live)
        return reserved

    def _reserved(self, state: RequestState) -> int:
        return -(-state.reserved_tokens // self.block_size)

    def _settle(self, request_id: str, state: SettlingState) -> None:
        """Settle the segment that is due, if any: it takes its new blocks before it frees the old ones.

        If too few blocks are free, held ones are freed, or elastic requests squeezed. If that is not enough,
        nothing has changed.
        """
        number = state.due(state.counts.num_computed_tokens)
        if number is None:
            return
        eviction = self.settled.settle(request_id, state, number)
        if eviction is None:
            kept = state.schedule.kept
            if not self.settled.make_room(kept):
                self._settle_shortages += 1
                self.squeezer.squeeze_for(request_id, (), kept, admitting=False)
            eviction = self.settled.settle(request_id, state, number)
        if eviction is not None:
            self.evictions[request_id] = eviction

    def _lacks_room_to_settle(self, request_id: str) -> bool:
        """Whether a segment is still due, right after :meth:`remove_skipped_blocks`."""
        state = self.settled.states.get(request_id)
        return state is not None and state.due(state.counts.num_computed_tokens) is not None

    def evict(self, request_id: str, state: EvictionState, indices: EvictionIndices) -> None:
        """Free the doomed blocks, and note the eviction for the workers."""
        table = self.req_to_blocks[request_id]
        doomed = [table[index] for index in indices.doomed]
        computed = state.counts.num_computed_tokens
        if state.policy.moves_tokens:
            check_private(table[index] for index in state.private(indices))
        self.evictions[request_id] = Eviction(
            request_id=request_id,
            heavy_blocks=tuple(table[index].block_id for index in indices.heavy),
            doomed_blocks=tuple(block.block_id for block in doomed),
            holes=indices.doomed,
            ranks=state.policy.indices(in_prompt=computed < state.context),
            fresh_blocks=tuple(table[index].block_id for index in indices.fresh),
            fresh_from=min(indices.fresh, default=computed // self.block_size) * self.block_size,
            fresh_gap=state.gap_in(indices.fresh),
            pinned=state.pinned_before(indices.heavy),
            seen=computed,
        )
        if self.enable_caching:
            # Before the table loses its doomed blocks.
            self._publish(state)
        for index in indices.doomed:
            table[index] = self.block_pool.null_block
        # Tail first, as everywhere in vLLM: the first blocks of a prompt are the most likely to be shared.
        self.block_pool.free_blocks(reversed(doomed))

    def _publish(self, state: EvictionState) -> None:
        # A token that is not sampled yet has no hash, and the last token of an ended request has no KV.
        counts = state.counts
        known = min(counts.num_computed_tokens, counts.num_tokens - counts.is_finished())
        self.cache_blocks(counts, known, replay_boundaries=())

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As the base class; also updates the request's ``peak_blocks``."""
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        state = self.states.get(request_id)
        if state is not None and blocks:
            # A request that finds nothing in the cache is admitted here alone.
            self.settled.answers.on_admission(request_id)
            live = len(self.req_to_blocks[request_id]) - state.holes
            state.peak_blocks = max(state.peak_blocks, live)
        return blocks

    def cache_blocks(self, request: Request, num_tokens: int, *how: Any, **options: Any) -> None:
        """As the base class, for the tokens that may be published."""
        state, computed = self.states.get(request.request_id), num_tokens
        if state is not None:
            num_tokens = state.publishable_tokens(num_tokens)
        super().cache_blocks(request, num_tokens, *how, **options)
        self.settled.publish(request.request_id, computed)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """As the base class; also notes the segments of the hit. vLLM calls this only at admission."""
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self.settled.resume(request_id, num_local_computed_tokens)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As the base class; also cancels a pending eviction, and forgets the request if it is finished.

        A finished elastic request that was never squeezed publishes all that it has computed: no eviction
        will rank it. A segment that settles in this step is not cancelled: other requests may have found it.
        """
        if request_id not in self.settled.states:
            self.evictions.pop(request_id, None)
        self._early.pop(request_id, None)
        state = self.states.get(request_id)
        if state is not None:
            if state.counts.is_finished():
                self._end(request_id, state)
            else:
                withdraw_unfilled(self, request_id, state.counts.num_computed_tokens)
                state.release()
        self.settled.release_held(request_id)
        return super().pop_blocks_for_free(request_id)

    def _end(self, request_id: str, state: RequestState) -> None:
        """Report and forget a finished request."""
        elastic = self.squeezer.elastic.get(request_id)
        if elastic is not None and elastic.squeezable and self.enable_caching:
            self._publish(elastic)
        self.settled.end(request_id)
        self._final_reports[request_id] = state.report()
        for states in (self.states, self.squeezer.elastic, self._reserving):
            states.pop(request_id, None)
