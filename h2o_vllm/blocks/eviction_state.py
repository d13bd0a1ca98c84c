# SPDX-License-Identifier: Apache-2.0
"""The eviction state of one request: what it may read from the prefix cache and publish, and its report.

Runs in the engine core. No vLLM: it sees block-table indices, never blocks.
"""

from __future__ import annotations

from typing import Any

from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.blocks.report import budget_values, request_report
from h2o_vllm.blocks.request_counts import RequestCounts
from h2o_vllm.blocks.timeline import EvictionIndices, Timeline
from h2o_vllm.config.request_budget import RequestBudget

__all__ = ["EvictionIndices", "EvictionState"]


class EvictionState(Timeline):
    """A request's timeline, and what others may see of its blocks.

    By causality a token behind the pinned blocks gets attention from tokens behind them only. So KV of pinned
    blocks may come from the prefix cache, whatever the policy: no eviction ranks it by its scores. The first
    eviction's doomed blocks follow at once, and counts tell how many they will be. They are only read: if the
    policy needs no scores, they come from the cache as well, and other requests may find them there.
    """

    _untouched: int
    """First blocks that no eviction writes, ever, nor will rank by scores of theirs."""

    def __init__(
        self, counts: RequestCounts, budget: RequestBudget, block_size: int, max_model_len: int
    ) -> None:
        self._cached: int | None = None
        self.drafted = 0
        """Tokens that were drafted for it, and computed."""
        self.accepted = 0
        """Those of them that became tokens of the answer."""
        super().__init__(counts, budget, block_size, max_model_len)
        self._budget_values = budget_values(self.budget, block_size)

    @property
    def stock(self) -> bool:
        """Whether nobody has to know anything of its tokens: it uses the prefix cache as in stock vLLM."""
        return not self.evicts or (self._evict_from is None and not self.policy.needs_scores)

    def evict(self, computed: int) -> EvictionIndices | None:
        """As the base class."""
        first = self._evicted_at is None
        indices = super().evict(computed)
        if first and indices is not None:
            # The first ones behind the pinned blocks: never written, and ranked no more.
            self._untouched = self.pinned + len(indices.doomed)
        return indices

    def release(self) -> None:
        """As the base class."""
        super().release()
        self._untouched = self._readable

    def private(self, evicted: EvictionIndices) -> tuple[int, ...]:
        """Of what has just been evicted, the blocks that nobody else may see.

        Those that are written, and those that are ranked by scores which others would add to.
        """
        if self.policy.needs_scores:
            return (*evicted.heavy, *evicted.doomed)
        return (*evicted.heavy, *(index for index in evicted.doomed if index >= self._untouched))

    @property
    def _readable(self) -> int:
        """First blocks that may come from the prefix cache, if the request is not stock."""
        begin, due = self._begin, self._first_due
        if begin is None or due is None or self.policy.needs_scores:
            return self.pinned
        if self.policy.moves_tokens:
            return self.pinned + self.schedule.freed(due, self._evict_from)
        # Less than that: an eviction that is due right there would be skipped.
        return max(self.pinned, (begin - 1) // self.block_size)

    def publishable_tokens(self, computed: int) -> int:
        """How many leading tokens' KV may be hashed into the prefix cache.

        Never KV that was computed after an eviction (it depends on the budget), and, if the policy writes
        into surviving blocks, only pinned ones and those that the first eviction frees: if it needs scores,
        with that eviction and no sooner, for a reader's attention would be added to them. Those of a lossless
        answer that has ended are never ranked.
        """
        if self.stock or (self.squeezable and self.counts.is_finished()):
            return computed
        if self.policy.moves_tokens:
            return min(computed, self._untouched * self.block_size)
        return computed if self._evicted_at is None else min(computed, self._evicted_at)

    def readable_tokens(self, known: int) -> int:
        """How many of the ``known`` tokens may be read from the prefix cache.

        What will be written has to be computed, and what is ranked by scores: cached KV has none. And who
        returns after a preemption may find KV cached from behind its first eviction, of others who did not.
        """
        return known if self.stock else min(known, self._readable * self.block_size)

    def params(self) -> EvictionParams:
        """What workers have to know of it."""
        return EvictionParams(
            first_scored=self.policy.first_scored(self.prompt_tokens),
            late_from=self.policy.late_from(self.prompt_tokens),
            traced=self.budget.trace,
            shares_heads=self.budget.heads == "shared",
            pinned=self.pinned_tokens,
        )

    def admitted(self, cached: int) -> None:
        """The request starts behind ``cached`` tokens; counts the first time only, as vLLM does."""
        if self._cached is None:
            self._cached = cached

    def report(self) -> dict[str, object]:
        """The ``kv_cache`` report of this request, as of now."""
        return request_report(self.budget, self.block_size, *self._counts())

    def report_values(self) -> tuple[Any, ...]:
        """What :func:`~h2o_vllm.blocks.report.report_from_values` makes the same report of."""
        return (*self._budget_values, *self._counts())

    def _counts(self) -> tuple[int, int, int, int, int | None, int, int]:
        # The last sampled token has no KV yet, and async scheduling counts steps in flight.
        seen = min(self.counts.num_computed_tokens, self.counts.num_tokens - 1)
        drafts = (self.drafted, self.accepted)
        return seen, self.holes, self.peak_blocks, self._cached or 0, self.squeezed_at, *drafts
