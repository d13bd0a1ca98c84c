# SPDX-License-Identifier: Apache-2.0
"""The ``kv_cache`` report of one request, and the few values it is made of. Any process; imports no vLLM.

Stop strings are found by the front end, so any output of such a request may be its last, whose report a
client reads. The engine sends the values with each of these outputs, and the server makes a report of the
last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from h2o_vllm.blocks.budget import budget_tokens, protected_tokens
from h2o_vllm.config.options import FIELDS
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.policy.policy import Policy

__all__ = ["SETTINGS", "budget_values", "report_from_values", "request_report"]

SETTINGS = {row.reported: row.attribute for row in FIELDS.values() if row.reported}
"""Keys of a report that are settings of the request, and the attribute of its budget that each is."""

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

    ``budget`` is the fraction in force (``None`` for an absolute budget), ``budget_tokens``
    what that means for the tokens seen so far, floor, limits and protected tokens included.

    Args:
        budget: its protected tokens fill whole blocks, and so does the bound of its prompt.
        seen: tokens whose KV has been computed. holes: blocks evicted so far.
        cached: tokens of the prompt that were read from the prefix cache.
        squeezed_at: tokens seen when evictions began; ``None``: the answer is lossless.
        drafted: tokens that speculative decoding has drafted for it. accepted: those of them that it kept.
    """
    evicted = holes * block_size
    return {
        "budget": None if budget.tokens is not None else budget.fraction,
        "budget_tokens": budget_tokens(budget, seen),
        **{key: _plain(getattr(budget, attribute)) for key, attribute in SETTINGS.items()},
        "squeezed_at": squeezed_at,
        "tokens_seen": seen,
        "tokens_cached": cached,
        "tokens_protected": protected_tokens(budget, seen),
        "tokens_held": seen - evicted,
        "tokens_evicted": evicted,
        "blocks_freed": holes,
        "peak_blocks": peak_blocks,
        "tokens_drafted": drafted,
        "tokens_accepted": accepted,
        "block_size": block_size,
    }


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Policy) else value


def budget_values(budget: RequestBudget, block_size: int) -> tuple[Any, ...]:
    """The first values of a report, which stay as they are while the request runs."""
    values = vars(budget) | {"policy": budget.policy.name}
    return (*values.values(), block_size)


def report_from_values(values: Sequence[Any]) -> dict[str, object]:
    """The report made of :func:`budget_values`, and what :func:`request_report` takes from ``seen`` on."""
    given = dict(zip(_BUDGET_FIELDS, values, strict=False))
    given["policy"] = Policy.parse(given["policy"], calibrated=True)
    return request_report(RequestBudget(**given), *values[len(_BUDGET_FIELDS) :])
