# SPDX-License-Identifier: Apache-2.0
"""The state of a request, as the manager and the scheduler use it, and its report. Engine core; no vLLM."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from h2o_vllm.blocks.counts.drafts import DraftCounts
from h2o_vllm.blocks.counts.report import request_report
from h2o_vllm.blocks.counts.schedule import Schedule
from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.policy.ranks import NEVER


class RequestCounts(Protocol):
    """The part of ``vllm.v1.request.Request`` that eviction states and their manager need."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int
    priority: int
    arrival_time: float
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of its full blocks, by vLLM. Each covers all tokens up to its block's end."""

    def is_finished(self) -> bool:
        """Whether the request has left the engine."""


class RequestState(ABC):
    """The blocks that one request has given back, and the tokens that it may read from the cache and publish.

    Args:
        counts: the request; read, never written.
        schedule: when it gives back blocks, and how many.
        max_model_len: the most tokens of any sequence.
    """

    holes: int
    """Number of blocks given back."""
    schedule: Schedule

    def __init__(self, counts: RequestCounts, schedule: Schedule, max_model_len: int) -> None:
        self.counts = counts
        self.schedule = schedule
        self.block_size = schedule.block_size
        self.prompt_tokens = schedule.prompt_tokens
        """Tokens of the prompt. A preemption does not change it."""
        self.context = schedule.context
        """See :attr:`.Schedule.context`."""
        self.budget = schedule.budget
        """The budget, rounded to blocks."""
        self.pinned = int(self.budget.protect) // self.block_size
        """Number of pinned blocks: the first ones of the table, which hold the protected tokens."""
        first = self.budget.end_from // self.block_size if self.budget.end else NEVER
        self.end = range(first, first + self.budget.end // self.block_size)
        """Table indices of the blocks that hold the prompt's protected end."""
        self.policy = self.budget.policy
        # Evictions come before a forward pass, so the last sampled token causes none. The excess never falls
        # as a sequence grows, so it is enough to check the last count.
        self._last = min(self.prompt_tokens + counts.max_tokens - 2, max_model_len - 1)
        self.evicts = schedule.can_evict(self._last)
        """Whether this request can ever give back a block. If not, stock vLLM serves it."""
        self.reserved_tokens = schedule.reserved_tokens(self._last + 1) if self.evicts else 0
        self.peak_blocks = 0
        self.drafts = DraftCounts()
        self._cached: int | None = None
        self._squeezed_at: int | None = None

    @property
    def pinned_tokens(self) -> int:
        """Tokens in pinned blocks."""
        return self.pinned * self.block_size

    @property
    def squeezed_at(self) -> int | None:
        """Tokens seen when evictions began; ``None`` while no token of the answer came after an eviction.

        Asynchronous scheduling may evict from a request while its last token is being computed.
        """
        at = self._squeezed_at
        return at if at is not None and self.counts.num_tokens > at + 1 else None

    @abstractmethod
    def chunk_limit(self, computed: int, num_tokens: int) -> int:
        """The number of tokens to compute now, at most ``num_tokens``.

        So that no eviction is skipped, and no step has both early and late queries.
        """

    @abstractmethod
    def peak_tokens(self, total: int) -> int:
        """The most tokens held at once while ``total`` are computed, if the request is never squeezed."""

    @abstractmethod
    def release(self) -> None:
        """Note that the request was preempted or has finished, and holds no blocks."""

    @abstractmethod
    def publishable_tokens(self, computed: int) -> int:
        """How many leading tokens the prefix cache may hold under vLLM's own keys."""

    @abstractmethod
    def readable_tokens(self, known: int) -> int:
        """How many of the ``known`` tokens may be read from the prefix cache."""

    def params(self) -> EvictionParams:
        """What workers get with the request."""
        return EvictionParams(
            first_scored=self.policy.first_scored(self.context),
            traced=self.budget.trace,
            shares_heads=self.budget.heads == "shared",
            pinned=self.pinned_tokens,
        )

    def admitted(self, cached: int) -> None:
        """Note that the request starts after ``cached`` tokens from the prefix cache.

        Only the first call counts, as in vLLM: a resumed request keeps its first number.
        """
        if self._cached is None:
            self._cached = cached

    def report(self) -> dict[str, object]:
        """The ``kv_cache`` report of this request so far."""
        # The last sampled token has no KV yet, and async scheduling counts steps in flight.
        seen = min(self.counts.num_computed_tokens, self.counts.num_tokens - 1)
        return request_report(
            self.schedule,
            seen,
            self.holes,
            self.peak_blocks,
            cached=self._cached or 0,
            squeezed_at=self.squeezed_at,
            drafted=self.drafts.computed,
            accepted=self.drafts.accepted,
        )
