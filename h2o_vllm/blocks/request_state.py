# SPDX-License-Identifier: Apache-2.0
"""What the manager and the scheduler ask of a request with a budget, and its report. Engine core; no vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.blocks.report import budget_values, request_report
from h2o_vllm.blocks.request_counts import RequestCounts
from h2o_vllm.blocks.schedule import Schedule

__all__ = ["RequestState"]


class RequestState(ABC):
    """The counts of one request: what it has given back, may read from the prefix cache, and may publish.

    Args:
        counts: the request; read, never written.
        schedule: when it gives back blocks.
        max_model_len: tokens no sequence exceeds.
    """

    holes: int
    """Blocks given back."""
    schedule: Schedule

    def __init__(self, counts: RequestCounts, schedule: Schedule, max_model_len: int) -> None:
        self.counts = counts
        self.schedule = schedule
        self.block_size = schedule.block_size
        self.prompt_tokens = schedule.prompt_tokens
        """Fixed at admission: also after a preemption, all that was known before the answer."""
        self.budget = schedule.budget
        """Rounded to blocks."""
        self.pinned = int(self.budget.protect) // self.block_size
        """Blocks of the protected tokens: the first of the table, in the end all of them full."""
        self.policy = self.budget.policy
        # Evictions come before a forward pass, so the last token ever sampled never causes one; what is
        # in excess never falls as a sequence grows, so the last count tells for all of them.
        self._last = min(self.prompt_tokens + counts.max_tokens - 2, max_model_len - 1)
        self.evicts = schedule.can_evict(self._last)
        """Whether this request can ever give back a block. If not, it is served by stock vLLM."""
        self.promised_tokens = schedule.promised_tokens(self._last + 1) if self.evicts else 0
        self.peak_blocks = 0
        self.drafted = 0
        """Tokens that were drafted for it, and computed."""
        self.accepted = 0
        """Those of them that became tokens of the answer."""
        self._cached: int | None = None
        self._squeezed_at: int | None = None
        self._budget_values = budget_values(self.budget, self.block_size)

    @property
    def pinned_tokens(self) -> int:
        """Tokens in pinned blocks."""
        return self.pinned * self.block_size

    @property
    def squeezed_at(self) -> int | None:
        """Tokens seen when evictions began; ``None`` as long as no token of the answer came after one.

        Asynchronous scheduling may evict from a request whose last token is being computed.
        """
        at = self._squeezed_at
        return at if at is not None and self.counts.num_tokens > at + 1 else None

    @abstractmethod
    def chunk_limit(self, computed: int, num_tokens: int) -> int:
        """How many of ``num_tokens`` to compute now so that no eviction point is skipped."""

    @abstractmethod
    def peak_tokens(self, total: int) -> int:
        """Most tokens that are held at once while ``total`` are computed, if nobody squeezes the request."""

    @abstractmethod
    def release(self) -> None:
        """Nothing is held any more: the request was preempted or has finished."""

    @abstractmethod
    def publishable_tokens(self, computed: int) -> int:
        """How many leading tokens' KV may be hashed into the prefix cache under vLLM's own keys."""

    @abstractmethod
    def readable_tokens(self, known: int) -> int:
        """How many of the ``known`` tokens may be read from the prefix cache."""

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
