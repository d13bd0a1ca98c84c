# SPDX-License-Identifier: Apache-2.0
"""The ``kv_cache`` report of one request. Engine core; imports no vLLM."""

from h2o_vllm.blocks.counts.budget import blocks_freed, budget_tokens, protected_tokens
from h2o_vllm.blocks.counts.schedule import Schedule
from h2o_vllm.blocks.counts.settling import SettlingSchedule
from h2o_vllm.config.settings import FIELDS

SETTINGS = {row.reported: row.attribute for row in FIELDS.values() if row.reported}
"""Report key -> budget attribute, for the keys that are settings of the request."""


def request_report(
    schedule: Schedule,
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
        schedule: of the request.
        seen: tokens whose KV has been computed. holes: blocks evicted so far.
        cached: prompt tokens that were read from the prefix cache.
        squeezed_at: tokens seen when the evictions of an elastic request began; ``None``: they did not.
        drafted: draft tokens of speculative decoding. accepted: how many of them became output.
    """
    budget, block_size = schedule.budget, schedule.block_size
    evicted, settled = holes * block_size, 0
    allowed = budget_tokens(budget, seen)
    settings = {key: getattr(budget, name) for key, name in SETTINGS.items()}
    settings["policy"] = budget.policy.name
    if isinstance(schedule, SettlingSchedule):
        allowed = schedule.held_tokens(seen)
        settled = holes // max(1, schedule.given_back) * schedule.segment
        settings |= {row.reported: None for row in FIELDS.values() if row.settling_ignores}
    return {
        "budget": None if budget.tokens is not None else budget.fraction,
        "budget_tokens": allowed,
        **settings,
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
        "nothing_evicted_reason": None if holes else _nothing_evicted_reason(schedule, seen),
        "block_size": block_size,
    }


def _nothing_evicted_reason(schedule: Schedule, seen: int) -> str:
    """Why a request that has seen ``seen`` tokens holds all of them, in one sentence."""
    budget = schedule.budget
    if not budget.evicts:
        return "kv_budget is 1, or kv_exact is true"
    if isinstance(schedule, SettlingSchedule):
        return f"the first segment settles at {schedule.due(1)} tokens (kv_settle_tokens)"
    if blocks_freed(budget, seen, schedule.block_size) <= 0:
        return _within_budget(schedule, seen)
    delay = f"the answer ended within kv_delay, {budget.delay} tokens"
    if budget.evict_from > schedule.prompt_tokens + budget.delay:
        delay = f"evictions begin at {budget.evict_from} tokens (kv_evict_from)"
    return "memory was never short (kv_elastic)" if budget.elastic else delay


def _within_budget(schedule: Schedule, seen: int) -> str:
    budget, protected = schedule.budget, protected_tokens(schedule.budget, seen)
    if budget.tokens is None and budget.fraction == 1.0:
        return f"the prompt is within its bound of {budget.prefill} tokens (kv_prefill_tokens)"
    kept = budget_tokens(budget, seen) - protected
    is_floor = budget_tokens(budget, seen) - min(int(budget.protect), seen) <= budget.floor
    why = "no budget is below kv_min_tokens" if is_floor else "whole blocks are freed"
    if not protected:
        return f"{kept} of {seen} tokens may stay, and {why}"
    first = "ends of the prompt" if budget.end else f"first {protected} tokens"
    which = "prompt is" if protected >= schedule.prompt_tokens else f"{first} are"
    rest = seen - protected
    return f"the {which} protected (kv_protect); of the other {rest} tokens {kept} may stay: {why}"
