# SPDX-License-Identifier: Apache-2.0
r"""When segments of a sequence settle, and how many blocks stay: counts alone. Engine core and API server.

::

    seen      0 .. pinned | segment 1 | segment 2 | ... | newest: at least the window, at most a segment more
    table     [ pinned ]  [best][NULL][best][NULL] ...    [ raw ][ raw ][ raw ][ tail ]

A segment settles as soon as ``window`` tokens follow it: the best tokens of it stay, in ``kept`` blocks, and
it is never ranked again. This depends neither on the prompt's end nor on the batch: the tokens held after n
tokens are a function of these n tokens and of the numbers here.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from h2o_vllm.blocks.counts.budget import share_of
from h2o_vllm.blocks.counts.schedule import EvictionSchedule, OtherGroup, Schedule, whole_blocks
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.errors import BudgetError

QUARTERS = 4
"""Segments per window."""

_MOST_KEPT = 2
"""Most that a segment keeps, in multiples of its share: whole blocks of it stay."""

_ROUNDING = 1e-9
"""1 / (1 - 0.9) is more than 10."""

_VERSION = 1
"""Version of the lineage. Increase it when the same numbers come to mean another result."""


@dataclass(frozen=True)
class SettlingSchedule(Schedule):
    """The eviction points of one request whose segments settle. Segments are numbered from 1."""

    bounded_by = "kv_settle_tokens"

    @classmethod
    def of(cls, budget: RequestBudget, block_size: int, prompt_tokens: int) -> Self:
        """Round ``budget`` to whole blocks. ``budget.protect`` must be a number."""
        segment = math.ceil(max(budget.settle, budget.floor) / QUARTERS / block_size) * block_size
        rounded = replace(
            budget, protect=whole_blocks(budget, block_size), settle=QUARTERS * segment
        )
        return cls(rounded, block_size, prompt_tokens)

    @property
    def bound(self) -> int:
        """See the base class."""
        return self.budget.settle

    window = bound
    """Number of newest tokens that never settle."""

    @property
    def pin(self) -> int:
        """Tokens before the first segment."""
        return int(self.budget.protect)

    @cached_property
    def segment(self) -> int:
        """Tokens per segment."""
        return self.window // QUARTERS

    @cached_property
    def kept(self) -> int:
        """Blocks per segment that stay."""
        return -(-share_of(self.budget.fraction, self.segment) // self.block_size)

    @cached_property
    def given_back(self) -> int:
        """Blocks per segment that are given back."""
        return self.segment // self.block_size - self.kept

    @property
    def too_small_reason(self) -> str:
        """Why a segment has too few blocks for ``kv_budget``, and the least window; empty: it has enough."""
        fraction, blocks = self.budget.fraction, self.segment // self.block_size
        if not self.budget.evicts or (
            self.given_back and self.kept <= _MOST_KEPT * fraction * blocks + _ROUNDING
        ):
            return ""
        return (
            f"{self.kept} of {blocks} blocks of {self.block_size} tokens in a segment, a quarter of it, "
            f"would stay for kv_budget {fraction:g}; least: {least_window(fraction, self.block_size)}"
        )

    def end(self, number: int) -> int:
        """Tokens up to the end of segment ``number``; 0: the pinned tokens."""
        return self.pin + number * self.segment

    def due(self, number: int) -> int:
        """Tokens seen when segment ``number`` settles, before the next token is computed."""
        return self.end(number) + self.window

    @property
    def stock_until(self) -> int:
        """Tokens seen when the first segment settles: KV before it equals that of stock vLLM."""
        return self.due(1)

    def settled(self, seen: int) -> int:
        """Number of segments that have settled when the token at position ``seen`` is computed."""
        return max(0, (seen - self.pin - self.window) // self.segment)

    def can_evict(self, last: int) -> bool:
        """See the base class."""
        return self.given_back > 0 and self.settled(last) > 0

    def held_tokens(self, seen: int) -> int:
        """Tokens held once ``seen`` are computed and each segment that is due has settled."""
        return seen - self.settled(seen) * self.given_back * self.block_size

    def peak_tokens(self, total: int) -> int:
        """See the base class.

        A segment that settles counts twice in that step: its own blocks, and the new blocks that stay.
        """
        number = self.settled(total - 1)
        if not number or not self.given_back:
            return total
        in_passing = self.held_tokens(self.due(number) - 1) + 1 + self.kept * self.block_size
        return max(in_passing, self.held_tokens(total - 1) + 1)

    def reserved_tokens(self, total: int) -> int:
        """The most tokens that a prompt holds if segments settle while it is computed; 0: none does."""
        prompt = min(self.prompt_tokens, total)
        return self.peak_tokens(prompt) if self.can_evict(prompt) else 0

    def check_served(self, others: Sequence[OtherGroup]) -> None:
        """As the base class: no other groups, whose blocks have no keys with a lineage; no short segments."""
        accepted = ""
        if others:
            accepted = "0 for a model with windows, chunks or states beside full attention"
        elif self.too_small_reason:
            accepted = f"0 or larger: {self.too_small_reason}"
        if accepted:
            raise BudgetError(self.bounded_by, self.bound, accepted)

    def lineage(self) -> bytes:
        """Digest of all that KV after the first settled segment depends on, except its tokens: 32 bytes."""
        policy = self.budget.policy.name
        counts = (self.pin, self.segment, self.window, self.kept, self.block_size)
        return hashlib.sha256(repr((_VERSION, policy, *counts)).encode()).digest()


def least_window(fraction: float, block_size: int) -> int:
    """Least ``kv_settle_tokens`` whose segments have enough blocks for ``fraction``, which is below 1."""
    # A segment of n blocks keeps ceil(fraction * n) of them: fewer than n, and at most twice the share.
    least = max(1 / (_MOST_KEPT * fraction), 1 / (1 - fraction))
    return QUARTERS * block_size * (math.ceil(least - _ROUNDING) - 1) + 1


def schedule_of(
    budget: RequestBudget, block_size: int, prompt_tokens: int
) -> EvictionSchedule | SettlingSchedule:
    """The eviction points of one request. ``budget.protect`` must be a number."""
    kind = SettlingSchedule if budget.settle else EvictionSchedule
    return kind.of(budget, block_size, prompt_tokens)


def default_blocks(config: H2OConfig, block_size: int, max_model_len: int) -> int:
    """The most blocks that a request with the server's default budget holds at once."""

    def schedule(prompt: int) -> EvictionSchedule | SettlingSchedule:
        return schedule_of(resolve_for(config, None, prompt), block_size, prompt)

    longest = max_model_len - 1
    # A longer prompt holds more, up to its bound, and leaves less room for the answer.
    short = min(config.short_prompt, longest)
    prompts = {1, short, schedule(longest).first or longest, longest}
    return max(schedule(one).needed_blocks(max_model_len, max_model_len) for one in prompts)
