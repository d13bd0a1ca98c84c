# SPDX-License-Identifier: Apache-2.0
"""The state of one request whose segments settle, from counts alone. Engine core; no vLLM."""

from dataclasses import replace
from functools import cached_property

from h2o_vllm.blocks.counts.request_state import RequestCounts, RequestState
from h2o_vllm.blocks.counts.settling import SettlingSchedule
from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.config.request_budget import RequestBudget


class SettlingState(RequestState):
    """How many segments of a request have settled, which determines the next one.

    Args:
        counts, budget, block_size, max_model_len: as for :class:`.EvictionState`.
    """

    schedule: SettlingSchedule

    def __init__(
        self, counts: RequestCounts, budget: RequestBudget, block_size: int, max_model_len: int
    ) -> None:
        schedule = SettlingSchedule.of(budget, block_size, counts.num_prompt_tokens)
        super().__init__(counts, schedule, max_model_len)
        self.release()

    @cached_property
    def lineage(self) -> bytes:
        """See :meth:`.SettlingSchedule.lineage`."""
        return self.schedule.lineage()

    def due(self, computed: int) -> int | None:
        """The segment that settles before the token at position ``computed`` is computed, or ``None``."""
        following = self.settled + 1
        return following if self.evicts and computed >= self.schedule.due(following) else None

    def resume(self, computed: int) -> None:
        """Note that ``computed`` tokens have KV, and that each segment due by then has settled."""
        self.settled = self.schedule.settled(computed)
        self.holes = self.settled * self.schedule.given_back
        if self.settled:
            self._squeezed_at = self.schedule.stock_until

    def release(self) -> None:
        """See the base class."""
        self.settled = self.holes = 0

    def params(self) -> EvictionParams:
        """See the base class."""
        return replace(super().params(), holes=self.holes)

    def chunk_limit(self, computed: int, num_tokens: int) -> int:
        """See the base class. A chunk, drafts included, ends where a segment settles."""
        due = self.schedule.due(self.schedule.settled(computed) + 1)
        return min(num_tokens, due - computed)

    def peak_tokens(self, total: int) -> int:
        """See the base class."""
        return self.schedule.peak_tokens(total) if self.evicts else total

    def publishable_tokens(self, computed: int) -> int:
        """See the base class."""
        return min(computed, self.schedule.stock_until) if self.evicts else computed

    def readable_tokens(self, known: int) -> int:
        """See the base class. Settled segments have other keys, see :class:`.settled.SettledBlocks`."""
        return known
