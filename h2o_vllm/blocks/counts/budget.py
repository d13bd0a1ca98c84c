# SPDX-License-Identifier: Apache-2.0
"""Budget arithmetic: how many tokens a request keeps, and when it has blocks to give back.

Pure functions of counts. All decisions of the scheduler follow from them. So each tensor-parallel rank, a
resumed request and the response's report compute the same result, and none reads a score. Engine core and
API server; imports only :mod:`h2o_vllm.config`.

A request that has computed ``seen`` tokens may keep ``budget_tokens(seen)`` of them. It gives back
a block as soon as a whole block is in excess::

    blocks_freed(seen) = (seen - budget_tokens(seen)) // block_size
    tokens held        = seen - blocks_freed * block_size
    budget_tokens     <= tokens held < budget_tokens + block_size

``seen - budget_tokens(seen)`` never falls as ``seen`` grows, so a block that is due stays due.

Protected first tokens do not count against the budget. It applies to the others, a protected end of the
prompt included. A recent window that begins before the prompt's end includes it, and nothing in it is ranked.

The newest tokens held are the recent window. Eviction ranks whole blocks or none of a block, so the window
begins at a block: the one nearest to its exact start. Rounding always in the window's favour would leave no
heavy hitters to a small budget. With 50 of 1,000 tokens and blocks of 32, that costs more than twice the
quality that evicting itself costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from h2o_vllm.config.request_budget import RequestBudget

_EPSILON = 1e-9
"""Keeps ``ceil(0.1 * 30)`` at 3: the product is 3.0000000000000004 in binary."""


def budget_tokens(budget: RequestBudget, seen: int) -> int:
    """Tokens that a request may keep of the ``seen`` it has computed: prompt, generated and protected."""
    if not budget.evicts:
        return seen
    first = min(int(budget.protect), seen)
    return first + _kept_of_rest(budget, seen - first)


def protected_tokens(budget: RequestBudget, seen: int) -> int:
    """How many of the ``seen`` tokens are protected. ``budget.protect`` must be a number."""
    return min(int(budget.protect), seen) + min(max(0, seen - budget.end_from), budget.end)


def recent_tokens(budget: RequestBudget, seen: int) -> int:
    """Tokens of the recent window, before it is rounded to blocks."""
    kept = _kept_of_rest(budget, max(0, seen - int(budget.protect)))
    return round(budget.recent * max(0, kept - budget.end))


def recent_from(budget: RequestBudget, seen: int, block_size: int) -> int:
    """Table index of the recent window's first block. All blocks before it are full.

    Never falls as ``seen`` grows.
    """
    start = seen - recent_tokens(budget, seen)
    return min((start + block_size // 2) // block_size, seen // block_size)


def blocks_freed(budget: RequestBudget, seen: int, block_size: int) -> int:
    """Blocks that a request has given back once its prompt is computed and ``seen`` tokens exist."""
    return (seen - budget_tokens(budget, seen)) // block_size


def share_of(fraction: float, tokens: int) -> int:
    """``fraction`` of ``tokens``, rounded up."""
    return math.ceil(fraction * tokens - _EPSILON)


def _kept_of_rest(budget: RequestBudget, rest: int) -> int:
    if budget.tokens is None:
        wanted = share_of(budget.fraction, rest)
    else:
        low = share_of(budget.min_fraction, rest)
        high = share_of(budget.max_fraction, rest)
        wanted = min(max(budget.tokens, low), high)
    return min(rest, max(wanted, budget.floor))


def next_eviction(
    budget: RequestBudget, seen: int, block_size: int, limit: int, freed: int | None = None
) -> int | None:
    """The smallest count in ``(seen, limit]`` at which one more block is given back, if any.

    Args:
        freed: blocks given back so far. ``None``: as many as the budget says.
    """
    already = blocks_freed(budget, seen, block_size) if freed is None else freed
    due = (already + 1) * block_size
    counts = range(seen + 1, limit + 1)
    at = bisect_left(counts, due, key=lambda count: count - budget_tokens(budget, count))
    return counts[at] if at < len(counts) else None
