# SPDX-License-Identifier: Apache-2.0
"""The eviction state of one request: which tokens it may read from the prefix cache and publish.

Runs in the engine core. Imports no vLLM: it handles block-table indices, never blocks.
"""

from __future__ import annotations

from h2o_vllm.blocks.counts.timeline import EvictionIndices, Timeline


class EvictionState(Timeline):
    """A request's timeline, and which of its blocks other requests may see.

    Pinned blocks are never ranked, so their KV may come from the prefix cache under any policy. By causality,
    only tokens after the pinned blocks attend to the ranked ones, so a cached prefix takes no scores from
    them.

    The blocks that the first eviction dooms follow the pinned ones, and counts alone give their number. That
    eviction only reads them. If the policy needs no scores, they too may come from the cache, and other
    requests may find them there.
    """

    _untouched: int
    """Number of first blocks that no eviction writes, and that no later eviction ranks by their scores."""

    @property
    def stock(self) -> bool:
        """Whether the request uses the prefix cache as in stock vLLM.

        It does if it cannot evict, or if it is elastic, not squeezed yet, and needs no scores.
        """
        return not self.evicts or (self._evict_from is None and not self.policy.needs_scores)

    def evict(self, computed: int) -> EvictionIndices | None:
        """As the base class."""
        first = self._evicted_at is None
        indices = super().evict(computed)
        if first and indices is not None:
            # These follow the pinned blocks. They are never written, and no later eviction ranks them.
            self._untouched = self.pinned + len(indices.doomed)
        return indices

    def release(self) -> None:
        """As the base class."""
        super().release()
        self._untouched = self._readable

    def private(self, evicted: EvictionIndices) -> tuple[int, ...]:
        """Table indices of this eviction's blocks that no other request may see.

        These are the blocks that it writes, and the blocks that it ranks by scores: the attention of another
        request would be added to those scores.
        """
        if self.policy.needs_scores:
            return (*evicted.heavy, *evicted.doomed)
        return (*evicted.heavy, *(index for index in evicted.doomed if index >= self._untouched))

    @property
    def _readable(self) -> int:
        """Number of first blocks that may come from the prefix cache, if the request is not stock."""
        begin, due = self._begin, self._first_due
        if begin is None or due is None or self.policy.needs_scores:
            return self.pinned
        if self.policy.moves_tokens:
            return self.pinned + self.schedule.freed(due, self._evict_from)
        # One token less: a hit that ends at ``begin`` would skip the eviction that is due there.
        return max(self.pinned, (begin - 1) // self.block_size)

    def publishable_tokens(self, computed: int) -> int:
        """How many leading tokens the prefix cache may hold.

        KV that was computed after an eviction depends on the budget, so it is never published. If the policy
        moves tokens, only two kinds of blocks are published: pinned ones, and those that the first eviction
        frees. If the policy needs scores, the latter are published with that eviction and not before: the
        attention of a request that reads them would be added to their scores. A lossless answer that has
        ended is never ranked, so all of it is published.
        """
        if self.stock or (self.squeezable and self.counts.is_finished()):
            return computed
        if self.policy.moves_tokens:
            return min(computed, self._untouched * self.block_size)
        return computed if self._evicted_at is None else min(computed, self._evicted_at)

    def readable_tokens(self, known: int) -> int:
        """How many of the ``known`` tokens may be read from the prefix cache.

        Not the tokens of blocks that will be written. Not tokens that are ranked by scores: cached KV has
        none. And not tokens after the first eviction: a request that resumes after a preemption may find them
        in the cache, computed by another request that did not evict.
        """
        return known if self.stock else min(known, self._readable * self.block_size)
