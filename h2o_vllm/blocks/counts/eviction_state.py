# SPDX-License-Identifier: Apache-2.0
"""The state of one request: which blocks it gives back, reads from the prefix cache and publishes.

Runs in the engine core. Imports no vLLM: it handles block-table indices, never blocks.
"""

import math
from collections.abc import Sequence

from h2o_vllm.blocks.counts.request_state import RequestCounts, RequestState
from h2o_vllm.blocks.counts.schedule import EvictionSchedule
from h2o_vllm.blocks.counts.split import (
    EvictionIndices,
    drop_oldest,
    fresh_blocks,
    rank_all,
)
from h2o_vllm.config.request_budget import RequestBudget


class EvictionState(RequestState):
    """The blocks that a request holds, those that it has given back, and those that others may see.

    ::

        | pinned: protected, never ranked | candidates: doomed, heavy | protected end | candidates | recent |
        0                              pinned                                                  recent_from

    The protected end, with ``kv_protect`` ``"ends"``, may lie in the recent window.

    Evictions begin ``delay`` tokens after the prompt, or after ``evict_from`` tokens, whichever is later. If
    ``evict_from`` is inside the prompt, they begin there, and the rest is computed as an answer would be. The
    evictions of an elastic request begin when :meth:`squeeze` is called, and not before its delay. That point
    is final: a preemption does not change it. So the output is a function of the request and of the tokens
    seen when its evictions began.

    Pinned blocks are never ranked, so their KV may come from the prefix cache under any policy. By causality,
    only tokens after the pinned blocks attend to the ranked ones, so a cached prefix takes no scores from
    them. The blocks that the first eviction dooms follow the pinned ones, and counts alone give their number.
    That eviction only reads them. If the policy needs no scores, they too may come from the cache, and other
    requests may find them there.

    A prompt that is longer than its bound gives back blocks while it is computed. Its answer cannot be
    lossless, so the request is not treated as elastic: its budget applies as early as possible.

    Args:
        counts: the request; read, never written.
        budget: what it may keep. ``protect`` must be a number. :class:`EvictionSchedule` rounds it to blocks.
        block_size: tokens per block.
        max_model_len: the most tokens of any sequence.
    """

    schedule: EvictionSchedule
    _evicted_at: int | None
    """Tokens seen at the first eviction since the request was admitted or resumed."""
    _candidates: list[int]
    """Table indices of blocks that evictions have ranked and kept."""
    _next_index: int
    """Table index of the first block that no eviction has ranked."""
    _next_due: float
    """Number of tokens seen before which no eviction is due."""
    _num_read_only_blocks: int
    """Number of first blocks that no eviction writes, and that no later eviction ranks by their scores."""

    def __init__(
        self, counts: RequestCounts, budget: RequestBudget, block_size: int, max_model_len: int
    ) -> None:
        schedule = EvictionSchedule.of(budget, block_size, counts.num_prompt_tokens)
        super().__init__(counts, schedule, max_model_len)
        lossless = budget.elastic and self.schedule.first is None
        self._late_from = self.policy.late_from(self.context)
        self._evict_from = None if lossless else self.schedule.earliest
        """Tokens seen before which the budget evicts nothing; ``None``: elastic, and not squeezed yet."""
        self.release()

    @property
    def squeezable(self) -> bool:
        """Whether the request is elastic and not squeezed yet: it keeps everything until then."""
        return self.evicts and self._evict_from is None

    @property
    def stock(self) -> bool:
        """Whether the request uses the prefix cache as in stock vLLM.

        It does if it cannot evict, or if it is elastic, not squeezed yet, and needs no scores.
        """
        return not self.evicts or (self._evict_from is None and not self.policy.needs_scores)

    def evict(self, computed: int) -> EvictionIndices | None:
        """Choose the blocks to give back before the token at position ``computed`` is computed.

        The caller must free the doomed blocks: the state counts them as freed. The result depends on
        ``computed`` alone, so not on the batch, on timing, or on the tensor-parallel rank.

        Args:
            computed: number of tokens with KV.

        Returns:
            Table indices, or ``None`` if no eviction is due.
        """
        if computed < self._next_due:
            return None
        num_doomed = self.schedule.freed(computed, self._evict_from) - self.holes
        if num_doomed <= 0:
            self._set_next_due(computed)
            return None
        indices = self._split(computed, num_doomed)
        doomed = frozenset(indices.doomed)
        self._candidates = [i for i in (*self._candidates, *indices.fresh) if i not in doomed]
        self._next_index = max((self._next_index, *(index + 1 for index in indices.fresh)))
        self.holes += num_doomed
        if self._evicted_at is None:
            # The doomed blocks follow the pinned ones, up to the protected end.
            self._num_read_only_blocks = min(self.pinned + num_doomed, self.end.start)
            self._evicted_at = computed
            if self._squeezed_at is None:
                self._squeezed_at = computed
        self._set_next_due(computed)
        return indices

    def early_from(self, computed: int) -> int | None:
        """Table index of the first block whose scores so far are the early parts of scores.

        ``None``: the first late query is not the one of the token at position ``computed``.
        """
        return self._next_index if computed == self._late_from else None

    def excess(self, computed: int) -> EvictionIndices | None:
        """What :meth:`squeeze` would choose now; ``None`` if the request cannot be squeezed. Changes nothing.

        A request that computes known tokens cannot be squeezed. These are its prompt, or, after a preemption,
        its answer so far, which was sampled with all KV.
        """
        if not self.squeezable or not self._is_squeezable_at(computed):
            return None
        num_doomed = self.schedule.freed(computed, computed)
        if num_doomed <= 0:
            return None
        return self._split(computed, num_doomed)

    def _is_squeezable_at(self, computed: int) -> bool:
        return computed >= max(self.schedule.earliest, self.counts.num_tokens - 1)

    def squeeze(self, computed: int) -> EvictionIndices | None:
        """Begin evictions at ``computed``: as :meth:`evict`, for a request that has an :meth:`excess`."""
        self._evict_from = self._next_due = computed
        return self.evict(computed)

    @property
    def _begin(self) -> int | None:
        """Tokens seen before which nothing is evicted; ``None``: not known yet."""
        return self._evict_from if self.schedule.first is None else self.schedule.first

    def _split(self, computed: int, num_doomed: int) -> EvictionIndices:
        until = self.schedule.recent_from(computed)
        # The doomed blocks must lie before the recent window.
        least = self.holes + num_doomed + self.pinned
        until = max(until, least + len(self.end) * (least > self.end.start))
        first = self._evicted_at is None
        places = range(self._next_index, until)
        fresh = fresh_blocks(self._candidates, places, self.end, num_doomed, first=first)
        candidates = [*self._candidates, *fresh]
        if not self.policy.moves_tokens:
            return drop_oldest(candidates, num_doomed)._replace(fresh=fresh)
        return rank_all(candidates, num_doomed, first=first)._replace(fresh=fresh)

    def chunk_limit(self, computed: int, num_tokens: int) -> int:
        """See the base class.

        If the policy ranks by the prompt's end, a chunk ends before the first late query.

        Three kinds of requests have several tokens to compute where evictions may be due:

        * A prompt that is bounded, or evicted before its end.
        * A resumed request. It computes its known answer between the same evictions as the first time, so a
          preemption does not change the output.
        * A request with drafts. Its evictions come where they would come without drafts. This includes an
          elastic request that may be squeezed in this step.
        """
        if computed < self._late_from:
            num_tokens = min(num_tokens, self._late_from - computed)
        begin = self._evict_from
        if num_tokens <= 1 or (begin is None and not self._is_squeezable_at(computed)):
            return num_tokens
        until = computed + num_tokens
        if begin is None:
            begin = computed
        elif computed < begin:
            until = min(until, begin)
        due = self.schedule.next_due(computed, begin, until)
        return (until if due is None else due) - computed

    def peak_tokens(self, total: int) -> int:
        """See the base class."""
        if not self.evicts or self._evict_from is None:
            return total
        return self.schedule.peak_tokens(total, self._evict_from)

    def release(self) -> None:
        """See the base class."""
        self.holes = 0
        self._evicted_at = None
        self._candidates = []
        self._next_index = self.pinned
        self._next_due = math.inf if self._begin is None else self._begin
        self._num_read_only_blocks = self._num_cacheable_blocks

    def _set_next_due(self, computed: int) -> None:
        # The search is bounded, so it is cheap; it is repeated every 4,096 tokens at most.
        horizon = computed + 4096
        due = self.schedule.next_due(computed, self._evict_from, horizon)
        self._next_due = horizon if due is None else due

    def private(self, evicted: EvictionIndices) -> tuple[int, ...]:
        """Table indices of this eviction's blocks that no other request may see.

        These are the blocks that it writes, and the blocks that it ranks by scores: the attention of another
        request would be added to those scores.
        """
        if self.policy.needs_scores:
            return (*evicted.heavy, *evicted.doomed)
        return (
            *evicted.heavy,
            *(index for index in evicted.doomed if index >= self._num_read_only_blocks),
        )

    def gap_in(self, fresh: Sequence[int]) -> tuple[int, int]:
        """:attr:`.Eviction.fresh_gap` of these table indices."""
        before = sum(index < self.end.start for index in fresh)
        return (before, len(self.end)) if 0 < before < len(fresh) else (0, 0)

    def pinned_before(self, heavy: Sequence[int]) -> int:
        """:attr:`.Eviction.pinned` with heavy blocks of these table indices."""
        behind = self.budget.end if heavy and heavy[0] >= self.end.start else 0
        return self.pinned_tokens + behind

    @property
    def _num_cacheable_blocks(self) -> int:
        """Number of first blocks that may come from the prefix cache, if the request is not stock."""
        begin = self._begin
        if begin is None or self.policy.needs_scores:
            return self.pinned
        due = self.schedule.next_due(begin - 1, begin, max(self._last, begin))
        if due is None:
            return self.pinned
        if self.policy.moves_tokens:
            return min(self.pinned + self.schedule.freed(due, self._evict_from), self.end.start)
        # One token less: a hit that ends at ``begin`` would skip the eviction that is due there.
        return max(self.pinned, (begin - 1) // self.block_size)

    def publishable_tokens(self, computed: int) -> int:
        """See the base class.

        KV that was computed after an eviction depends on the budget, so it is never published. If the policy
        moves tokens, only two kinds of blocks are published: pinned ones, and those that the first eviction
        frees. If the policy needs scores, the latter are published with that eviction and not before: the
        attention of a request that reads them would be added to their scores. A lossless answer that has
        ended is never ranked, so all of it is published.
        """
        if self.stock or (self.squeezable and self.counts.is_finished()):
            return computed
        if self.policy.moves_tokens:
            return min(computed, self._num_read_only_blocks * self.block_size)
        return computed if self._evicted_at is None else min(computed, self._evicted_at)

    def readable_tokens(self, known: int) -> int:
        """See the base class.

        Not the tokens of blocks that will be written. Not tokens that are ranked by scores: cached KV has
        none. And not tokens after the first eviction: a request that resumes after a preemption may find them
        in the cache, computed by another request that did not evict.
        """
        return known if self.stock else min(known, self._num_cacheable_blocks * self.block_size)
