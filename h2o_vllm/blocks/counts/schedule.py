# SPDX-License-Identifier: Apache-2.0
r"""When a request gives back blocks, and how many: functions of counts alone. Engine core and API server.

::

    tokens seen   0 ...... first . first+step ........ prompt ......... begin ....................
    given back    nothing   step      step    ...      nothing          down to the budget, and on
                           \_______ the bound _______/                 \________ the budget ________/

While a prompt that is longer than its bound (``kv_prefill_tokens``) is computed, it holds at most the bound's
tokens: it gives back a quarter of them, computes the next quarter, and so on. These points are counts, so
they do not depend on chunk sizes or on the batch. After the prompt the budget applies. Evicted tokens do not
come back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

from h2o_vllm.blocks.counts.budget import blocks_freed, budget_tokens, next_eviction, recent_from
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.errors import BudgetError

LEAST_BOUND_BLOCKS = 4
"""Smallest bound, in blocks: a quarter of it is one block."""


class OtherGroup(NamedTuple):
    """What one request takes of the pool for layers that are not evicted (windows, chunks, states).

    Attributes:
        block_size: tokens per block; 1 if the number of blocks does not depend on the request's length.
        most: the largest number of blocks of one request.
    """

    block_size: int
    most: int

    def needed(self, tokens: int) -> int:
        """The largest number of blocks that ``tokens`` tokens take."""
        return min(-(-tokens // self.block_size), self.most)


def whole_blocks(budget: RequestBudget, block_size: int) -> int:
    """The protected tokens, rounded up to whole blocks. ``budget.protect`` must be a number."""
    return math.ceil(int(budget.protect) / block_size) * block_size


def protected_end(budget: RequestBudget, block_size: int, prompt_tokens: int) -> range:
    """Positions of the prompt's protected end: whole blocks of at most ``budget.end`` tokens.

    At most half of the budget, and of a bound, so that at least as many blocks are left for other tokens.
    """
    most = min(budget.end, budget_tokens(replace(budget, protect=0), prompt_tokens) // 2)
    if 0 < budget.prefill < prompt_tokens:
        most = min(most, budget.prefill // 2)
    stop = math.ceil(prompt_tokens / block_size) * block_size
    start = max(stop - most // block_size * block_size, whole_blocks(budget, block_size))
    return range(min(start, stop), stop)


@dataclass(frozen=True)
class Schedule(ABC):
    """When one request gives back blocks, and how many.

    Attributes:
        budget: with protected tokens and the prompt's bound rounded to whole blocks.
        block_size: tokens per block.
        prompt_tokens: tokens of the prompt.
    """

    budget: RequestBudget
    block_size: int
    prompt_tokens: int
    bounded_by: ClassVar[str]
    """The request field that bounds the blocks of a prompt; an error names it."""

    @cached_property
    def context(self) -> int:
        """Tokens before which the budget never applies: the prompt's, or those up to ``evict_from``."""
        return self.budget.context(self.prompt_tokens)

    @property
    @abstractmethod
    def bound(self) -> int:
        """The value of that field, rounded to whole blocks."""

    @property
    def first(self) -> int | None:
        """Tokens seen at the first eviction within the prompt; ``None`` if the prompt fits its bound."""
        return None

    @abstractmethod
    def can_evict(self, last: int) -> bool:
        """Whether a block is ever given back before the token at position ``last`` is computed."""

    @abstractmethod
    def peak_tokens(self, total: int) -> int:
        """Upper bound of the tokens that are held at once while ``total`` are computed."""

    def needed_blocks(self, max_tokens: int, max_model_len: int) -> int:
        """The most blocks that the request holds at once, if it generates ``max_tokens``.

        An elastic request is counted as if its budget applied from the earliest count on.
        """
        # The last sampled token has no KV.
        total = min(self.prompt_tokens + max_tokens, max_model_len) - 1
        return math.ceil(self.peak_tokens(total) / self.block_size)

    @abstractmethod
    def reserved_tokens(self, total: int) -> int:
        """The most tokens that a prompt with evictions, and the start of its answer, hold; 0: it has none.

        Args:
            total: the most tokens that the request can have at its end.
        """

    def check_served(self, others: Sequence[OtherGroup]) -> None:  # noqa: B027 - most are served
        """Check that the request can be served in a pool of any size, beside ``others``.

        Raises:
            BudgetError: it cannot.
        """

    def check_fits(
        self,
        pool: int,
        max_tokens: int | None,
        max_model_len: int,
        others: Sequence[OtherGroup] = (),
        drafts: int = 0,
        ahead: int = 0,
    ) -> None:
        """Check that an empty pool can hold the request.

        Args:
            pool: blocks in the pool. max_tokens: of the answer; ``None``: up to ``max_model_len``.
            others: groups of layers that are not evicted; they take blocks from the same pool.
            drafts: draft tokens that a step may compute after the answer's last token, and reject.
            ahead: tokens after those of a step that have slots as well: a drafter's own KV goes there.

        Raises:
            BudgetError: the pool is too small, and a smaller budget, bound or answer may fit; or as
                :meth:`check_served`.
        """
        self.check_served(others)
        most = max_model_len if max_tokens is None else max_tokens
        needed = self.needed_blocks(most + drafts, max_model_len)
        longest = math.ceil(max_model_len / self.block_size)
        needed = max(needed, min(needed + math.ceil(ahead / self.block_size), longest))
        tokens = min(self.prompt_tokens + most + drafts, max_model_len)
        room = max(0, pool - sum(group.needed(tokens) for group in others))
        if needed > room:
            size, answer = self.block_size, min(most, max_model_len - self.prompt_tokens)
            shared = " beside that of its other layers" if others else ""
            raise BudgetError(
                self.bounded_by,
                self.bound,
                f"such that at most {room * size} tokens of KV are held at once, all there is room for"
                f"{shared} (a prompt of {self.prompt_tokens} tokens and an answer of up to {answer} may hold "
                f"{needed * size}; a smaller kv_budget or max_tokens helps, too)",
            )


@dataclass(frozen=True)
class EvictionSchedule(Schedule):
    """The eviction points of one request whose budget applies after its prompt."""

    bounded_by = "kv_prefill_tokens"

    @classmethod
    def of(cls, budget: RequestBudget, block_size: int, prompt_tokens: int) -> Self:
        """Round ``budget`` to whole blocks. ``budget.protect`` must be a number."""
        prefill = 0
        if budget.prefill:
            # Three quarters of the bound have to hold the floor.
            least = max(LEAST_BOUND_BLOCKS, 2 * math.ceil(budget.floor / block_size))
            prefill = max(budget.prefill // block_size, least) * block_size
        rounded = replace(budget, protect=whole_blocks(budget, block_size), prefill=prefill)
        end = protected_end(rounded, block_size, rounded.context(prompt_tokens))
        rounded = replace(rounded, end=len(end), end_from=end.start)
        return cls(rounded, block_size, prompt_tokens)

    @property
    def bound(self) -> int:
        """See the base class."""
        return self.budget.prefill

    @cached_property
    def earliest(self) -> int:
        """Number of tokens seen before which the budget never evicts."""
        if self.context < self.prompt_tokens:
            return self.context
        return max(self.prompt_tokens + self.budget.delay, self.budget.evict_from)

    @cached_property
    def step(self) -> int:
        """Tokens computed between two evictions within a prompt: whole blocks."""
        return max(1, self.budget.prefill // 4 // self.block_size) * self.block_size

    @cached_property
    def first(self) -> int | None:
        """See the base class."""
        first = int(self.budget.protect) + self.budget.prefill
        return first if self.budget.prefill and first < self.context else None

    def freed(self, seen: int, begin: int | None) -> int:
        """Blocks given back once ``seen`` tokens exist. Never falls as ``seen`` grows.

        Args:
            begin: tokens seen from which on the budget applies; ``None``: it does not apply yet.
        """
        taken = self._freed_inside(seen)
        if begin is None or seen < begin:
            return taken
        return max(taken, blocks_freed(self.budget, seen, self.block_size))

    def next_due(self, seen: int, begin: int | None, limit: int) -> int | None:
        """The smallest count in ``(seen, limit]`` at which another block is given back, or ``None``."""
        inside = self._next_inside(seen)
        if inside is not None:
            return inside if inside <= limit else None
        if begin is None:
            return None
        freed = self.freed(seen, begin)
        return next_eviction(self.budget, max(seen, begin - 1), self.block_size, limit, freed)

    def recent_from(self, seen: int) -> int:
        """Table index of the recent window's first block. All blocks before it are full."""
        budget = self.budget
        if self.first is not None and seen < self.context:
            kept = budget.prefill - self.step
            budget = replace(budget, tokens=kept, min_fraction=0.0, max_fraction=1.0, floor=kept)
        return recent_from(budget, seen, self.block_size)

    def can_evict(self, last: int) -> bool:
        """See the base class."""
        return self.freed(last, self.earliest) > 0

    def peak_tokens(self, total: int, begin: int | None = None) -> int:
        """See the base class.

        Args:
            begin: tokens seen from which on the budget applies; ``None``: the earliest count.
        """
        begin = self.earliest if begin is None else begin
        inside = min(total, self.context, self.first or total)
        if total <= self.context:
            return inside
        inside_freed = self._freed_inside(total) * self.block_size
        # A request holds less than a block more than its budget, and neither count falls.
        most = budget_tokens(self.budget, total) + self.block_size if total > begin else 0
        at_begin = min(total, begin) - inside_freed
        return max(inside, at_begin, min(total - inside_freed, most))

    def reserved_tokens(self, total: int) -> int:
        """See the base class.

        Right after an eviction such a prompt holds a quarter less than its bound. At its end it may hold less
        than its budget allows; then the answer grows up to the budget.
        """
        if self.first is None:
            cut = self.context < self.prompt_tokens
            return self.peak_tokens(min(total, self.prompt_tokens)) if cut else 0
        beginning = budget_tokens(self.budget, self.prompt_tokens) + self.block_size
        return max(self.first, min(beginning, self.peak_tokens(total)))

    def _freed_inside(self, seen: int) -> int:
        """Blocks evicted by the bound. None at the prompt's end: the next token belongs to the answer."""
        seen = min(seen, self.context - 1)
        if self.first is None or seen < self.first:
            return 0
        return ((seen - self.first) // self.step + 1) * (self.step // self.block_size)

    def _next_inside(self, seen: int) -> int | None:
        if self.first is None:
            return None
        steps = max(0, (seen - self.first) // self.step + 1)
        due = self.first + steps * self.step
        return due if due < self.context else None
