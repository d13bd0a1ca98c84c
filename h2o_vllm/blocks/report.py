# SPDX-License-Identifier: Apache-2.0
"""The ``kv_cache`` report of one request, and the values it is made of. Any process; imports no vLLM.

The front end finds stop strings, so any output of a request with stop strings may be its last one. The engine
sends the values with each such output. The server makes the report from the values of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from h2o_vllm.blocks.budget import budget_tokens, protected_tokens
from h2o_vllm.blocks.settling import SettlingSchedule
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.settings import FIELDS
from h2o_vllm.policy.policy import Policy

__all__ = ["SETTINGS", "budget_values", "report_from_values", "request_report"]

SETTINGS = {row.reported: row.attribute for row in FIELDS.values() if row.reported}
"""Report key -> budget attribute, for the keys that are settings of the request."""

_BUDGET_FIELDS = tuple(field.name for field in fields(RequestBudget))


def request_report(
    budget: RequestBudget,
    block_size: int,
    seen: int,
    holes: int,
    peak_blocks: int,
    cached: int,
    squeezed_at: int | None,
    drafted: int = 0,
    accepted: int = 0,
) -> dict[str, object]:
    """The report of a request.

    Its ``budget`` is the fraction in force, ``None`` for an absolute budget. Its ``budget_tokens`` is the
    budget in tokens at ``seen``, floor, limits and protected tokens included. If segments settle, it is the
    number of tokens held when every segment that is due has settled. Its ``tokens_settled`` is the number of
    tokens seen that lie in settled segments, evicted ones included.

    Args:
        budget: with protected tokens and the prompt's bound rounded to whole blocks.
        seen: tokens whose KV has been computed. holes: blocks evicted so far.
        cached: prompt tokens that were read from the prefix cache.
        squeezed_at: tokens seen when the evictions of an elastic request began; ``None``: they did not.
        drafted: draft tokens of speculative decoding. accepted: how many of them became output.
    """
    evicted = holes * block_size
    allowed, settled = budget_tokens(budget, seen), 0
    if budget.settle:
        schedule = SettlingSchedule.of(budget, block_size, seen)
        allowed = schedule.held_tokens(seen)
        settled = holes // max(1, schedule.given_back) * schedule.segment
    return {
        "budget": None if budget.tokens is not None else budget.fraction,
        "budget_tokens": allowed,
        **{key: _plain(getattr(budget, attribute)) for key, attribute in SETTINGS.items()},
        "squeezed_at": squeezed_at,
        "tokens_seen": seen,
        "tokens_cached": cached,
        "tokens_protected": protected_tokens(budget, seen),
        "tokens_held": seen - evicted,
        "tokens_evicted": evicted,
        "tokens_settled": settled,
        "blocks_freed": holes,
        "peak_blocks": peak_blocks,
        "tokens_drafted": drafted,
        "tokens_accepted": accepted,
        "block_size": block_size,
    }


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Policy) else value


def budget_values(budget: RequestBudget, block_size: int) -> tuple[Any, ...]:
    """The first values of a report: those that do not change while the request runs."""
    values = vars(budget) | {"policy": budget.policy.name}
    return (*values.values(), block_size)


def report_from_values(values: Sequence[Any]) -> dict[str, object]:
    """The report of :func:`budget_values` and then :func:`request_report`'s arguments from ``seen`` on."""
    given = dict(zip(_BUDGET_FIELDS, values, strict=False))
    given["policy"] = Policy.parse(given["policy"], calibrated=True)
    return request_report(RequestBudget(**given), *values[len(_BUDGET_FIELDS) :])
