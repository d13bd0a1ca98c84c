# SPDX-License-Identifier: Apache-2.0
"""What one request gives back, and when: from counts alone.

Runs in the engine core. No vLLM: it sees block-table indices, never blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from h2o_vllm.blocks.request_counts import RequestCounts
from h2o_vllm.blocks.schedule import EvictionSchedule
from h2o_vllm.blocks.split import BlockSplit, drop_oldest, rank_all
from h2o_vllm.config.request_budget import RequestBudget

__all__ = ["EvictionIndices", "Timeline"]


class EvictionIndices(NamedTuple):
    """Table indices of one eviction, each ascending.

    ``heavy`` and ``doomed`` are those of :class:`.BlockSplit`; ``fresh`` are the ones
    among them that no earlier eviction has ranked, always neighbours.
    """

    heavy: tuple[int, ...]
    doomed: tuple[int, ...]
    fresh: range


class Timeline:
    """What a request holds and what it has given back.

    ::

        | pinned: protected, never ranked | candidates: doomed, heavy | recent |
        0                              pinned                   recent_from

    Evictions begin ``delay`` tokens behind the prompt, or behind ``evict_from`` tokens; those of an elastic
    request where :meth:`squeeze` says so behind its delay, once and for all: a preemption changes nothing
    about it. What a request generates is thus a function of the request and of the tokens seen when its
    evictions began.

    A prompt that is longer than its bound gives back blocks while it is computed. Such a request is not
    lossless: it is elastic no more, its budget rules as soon as it may.

    Args:
        counts: the request; read, never written.
        budget: what it may keep; ``protect`` is a number. :class:`EvictionSchedule` rounds it to blocks.
        block_size: tokens per block.
        max_model_len: tokens no sequence exceeds.
    """

    holes: int
    """Blocks given back."""
    _evicted_at: int | None
    """Tokens seen at the first eviction."""
    _candidates: list[int]
    """Blocks that evictions have ranked and spared."""
    _next_index: int
    """The first block that none has ranked."""
    _next_due: float
    """Tokens below which none is due."""

    def __init__(
        self, counts: RequestCounts, budget: RequestBudget, block_size: int, max_model_len: int
    ) -> None:
        self.counts = counts
        self.block_size = block_size
        self.prompt_tokens = counts.num_prompt_tokens
        """Fixed at admission: also after a preemption, all that was known before the answer."""
        self.schedule = EvictionSchedule.of(budget, block_size, self.prompt_tokens)
        self.budget = self.schedule.budget
        """Rounded to blocks."""
        self.pinned = int(self.budget.protect) // block_size
        """Blocks of the protected tokens: the first of the table, in the end all of them full."""
        self.policy = budget.policy
        # Evictions come before a forward pass, so the last token ever sampled never causes one; what is
        # in excess never falls as a sequence grows, so the last count tells for all of them.
        last = min(self.prompt_tokens + counts.max_tokens - 2, max_model_len - 1)
        self.evicts = self.schedule.can_evict(last)
        """Whether this request can ever give back a block. If not, it is served by stock vLLM."""
        self.promised_tokens = self.schedule.promised_tokens(last + 1) if self.evicts else 0
        self._last = last
        lossless = budget.elastic and self.schedule.first is None
        self._evict_from = None if lossless else self.schedule.earliest
        """Tokens seen before which the budget takes nothing; ``None``: no squeeze has happened yet."""
        self.peak_blocks = 0
        self._squeezed_at: int | None = None
        self.release()

    @property
    def pinned_tokens(self) -> int:
        """Tokens in pinned blocks."""
        return self.pinned * self.block_size

    @property
    def squeezable(self) -> bool:
        """Whether this request keeps everything until it is squeezed, which may happen once."""
        return self.evicts and self._evict_from is None

    @property
    def squeezed_at(self) -> int | None:
        """Tokens seen when evictions began; ``None`` as long as no token of the answer came after one.

        Asynchronous scheduling may evict from a request whose last token is being computed.
        """
        at = self._squeezed_at
        return at if at is not None and self.counts.num_tokens > at + 1 else None

    def evict(self, computed: int) -> EvictionIndices | None:
        """Choose the blocks to give back before the token at position ``computed`` is computed.

        The caller must free what is doomed: they count as gone here. Depends on ``computed``
        alone, hence not on the batch, on timing, or on the tensor-parallel rank.

        Args:
            computed: tokens whose KV exists.

        Returns:
            Table indices, or ``None`` when nothing is due.
        """
        if computed < self._next_due:
            return None
        num_doomed = self.schedule.freed(computed, self._evict_from) - self.holes
        if num_doomed <= 0:
            self._set_next_due(computed)
            return None
        split, fresh = self._split(computed, num_doomed)
        doomed = frozenset(split.doomed)
        self._candidates = [i for i in (*self._candidates, *fresh) if i not in doomed]
        self._next_index = max(self._next_index, fresh.stop)
        self.holes += num_doomed
        if self._evicted_at is None:
            self._evicted_at = computed
            if self._squeezed_at is None:
                self._squeezed_at = computed
        self._set_next_due(computed)
        return EvictionIndices(split.heavy, split.doomed, fresh)

    def excess(self, computed: int) -> EvictionIndices | None:
        """What :meth:`squeeze` would choose now, if it may. Changes nothing.

        Not from a request that is still computing known tokens: its prompt, or after a preemption an answer
        whose tokens have come of KV that was whole.
        """
        if not self.squeezable or not self._is_squeezable_at(computed):
            return None
        num_doomed = self.schedule.freed(computed, computed)
        if num_doomed <= 0:
            return None
        split, fresh = self._split(computed, num_doomed)
        return EvictionIndices(split.heavy, split.doomed, fresh)

    def _is_squeezable_at(self, computed: int) -> bool:
        return computed >= max(self.schedule.earliest, self.counts.num_tokens - 1)

    def squeeze(self, computed: int) -> EvictionIndices | None:
        """Evictions begin here: as :meth:`evict`, for a request of which there is an :meth:`excess`."""
        self._evict_from = self._next_due = computed
        return self.evict(computed)

    @property
    def _begin(self) -> int | None:
        """Tokens seen before which nothing is evicted."""
        return self._evict_from if self.schedule.first is None else self.schedule.first

    @property
    def _first_due(self) -> int | None:
        """Tokens seen at the first eviction; ``None``: there is none, or it is not known yet."""
        begin = self._begin
        if begin is None:
            return None
        return self.schedule.next_due(begin - 1, begin, max(self._last, begin))

    def _split(self, computed: int, num_doomed: int) -> tuple[BlockSplit, range]:
        until = self.schedule.recent_from(computed)
        # What is given back comes before what is recent.
        until = max(until, self.holes + num_doomed + self.pinned)
        fresh = range(self._next_index, until)
        candidates = [*self._candidates, *fresh]
        if not self.policy.moves_tokens:
            return drop_oldest(candidates, num_doomed), fresh
        return rank_all(candidates, num_doomed, first=self._evicted_at is None), fresh

    def chunk_limit(self, computed: int, num_tokens: int) -> int:
        """How many of ``num_tokens`` to compute now so that no eviction point is skipped.

        Only bounded prompts are evicted from, and only a resumed request has several known tokens behind
        its own. Replaying them between the same evictions as the first time makes a preemption invisible
        in the output.

        Drafts end there as well: an eviction comes where it would come without them. So do those of an
        elastic request that may be squeezed in this step.
        """
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
        """Most tokens that are held at once while ``total`` are computed, if nobody squeezes the request."""
        if not self.evicts or self._evict_from is None:
            return total
        return self.schedule.peak_tokens(total, self._evict_from)

    def release(self) -> None:
        """Nothing is held any more: the request was preempted or has finished."""
        self.holes = 0
        self._evicted_at = None
        self._candidates = []
        self._next_index = self.pinned
        self._next_due = math.inf if self._begin is None else self._begin

    def _set_next_due(self, computed: int) -> None:
        # A horizon instead of infinity: the search is then cheap and repeated rarely.
        horizon = computed + 4096
        due = self.schedule.next_due(computed, self._evict_from, horizon)
        self._next_due = horizon if due is None else due
