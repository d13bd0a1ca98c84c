# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked to calibrate it: few requests, chosen so that no two costs go together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BATCHES", "WARM_UP", "Batch"]


@dataclass(frozen=True)
class Batch:
    """Requests that come at once; the next batch waits until all have been answered.

    Attributes:
        prompts: tokens of each prompt.
        output_tokens: of each answer.
        budget: ``kv_budget`` of every ``every``-th request, the others keep everything; vLLM itself asks for
            nothing.
    """

    prompts: Sequence[int]
    output_tokens: int
    budget: float = 1.0
    every: int = 1

    def budget_of(self, number: int) -> float:
        """``kv_budget`` of request ``number``."""
        return 1.0 if number % self.every else self.budget

    def fields(self, number: int) -> dict[str, float] | None:
        """What it asks of us: to evict at once, as answers are short."""
        budget = self.budget_of(number)
        return {"kv_budget": budget, "kv_delay": 0} if budget < 1 else None

    @property
    def budgets(self) -> bool:
        """Whether any request has one: vLLM itself is not asked then."""
        return self.budget < 1


def _each(prompts: Sequence[int], output_tokens: int, *budgets: float) -> list[Batch]:
    return [Batch(prompts, output_tokens, budget) for budget in budgets]


BATCHES = [
    # One request: the constant, and what a prompt costs at three lengths. Where a budget keeps nearly all,
    # attention is scored and its context long.
    *_each([32], 12, 1.0),
    *_each([400], 12, 1.0, 0.2),
    *_each([1400], 12, 1.0, 0.9, 0.2),
    # Many short ones: what a request costs. Few long ones: what context costs.
    *_each([64] * 16, 12, 1.0),
    *_each([200] * 16, 12, 0.5),
    *_each([24] * 32, 8, 1.0),
    *_each([800] * 4, 16, 1.0, 0.9, 0.2),
    # As many long ones as a busy engine has: their context costs more per token than that of a few, by
    # whatever a processor's caches no longer hold.
    *_each([1000] * 14, 8, 1.0),
    *_each([1000] * 6, 12, 0.9),
    # Prompts while others decode, with and without a budget.
    Batch([300, 900, 500, 1100], 24, budget=0.2, every=2),
]
"""In a pool that holds them all; some three minutes on two cores with a model of 135M parameters."""

WARM_UP = [*_each([300] * 2, 4, 1.0, 0.2), *_each([64] * 8, 4, 1.0)]
"""Every code path once."""
