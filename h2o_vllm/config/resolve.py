# SPDX-License-Identifier: Apache-2.0
"""Check the fields of a request, and fill in the defaults of the server. Imports its siblings.

Runs in the API server, which refuses with a 400, and in the engine core, for requests of the offline API.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.request_fields import EXACT_SHARE, ROLE_WORDS
from h2o_vllm.config.settings import FIELDS, REQUEST_FIELDS, check_exclusions, excluding
from h2o_vllm.errors import BudgetError
from h2o_vllm.policy.policy import Policy


def resolve(config: H2OConfig, asked: Mapping[str, Any] | None) -> RequestBudget:
    """Make the budget of a request from its fields and the defaults.

    ``protect`` may still be a word, on which ``recent`` depends; :func:`for_prompt` settles both.

    Args:
        asked: a mapping that may hold any of :data:`~h2o_vllm.config.settings.REQUEST_FIELDS`; other
            keys are ignored.

    Raises:
        BudgetError: a field has the wrong type, is out of range, or contradicts another.
    """
    given = {k: asked[k] for k in REQUEST_FIELDS if asked and asked.get(k) is not None}
    check_exclusions(given)
    policy, settle = _policy(config, given)
    settings = config.defaults(policy, settle) | given
    values = {
        row.attribute: _checked(config, row.name, settings[row.name])
        for row in FIELDS.values()
        if row.attribute and settings[row.name] is not None
    }
    if settle:
        values |= {row.attribute: row.kind() for row in FIELDS.values() if row.settling_ignores}
    fraction, tokens = _budget(config, given)
    if settle and tokens is not None:
        accepted = "0 where the server's budget is --kv-budget-tokens, unless kv_budget is given"
        raise BudgetError("kv_settle_tokens", settle, accepted)
    elastic, evict_from = _begin(config, given, default=settings["kv_elastic"])
    values |= {
        "policy": policy,
        "recent_of_answers": (
            values["recent"]
            if settle or "kv_recent" in given
            else config.recent_of(policy, answers=True)
        ),
        "fraction": fraction,
        "tokens": tokens,
        "min_fraction": config.kv_budget_min,
        "max_fraction": config.kv_budget_max,
        "floor": config.kv_min_tokens,
        "elastic": elastic,
        "evict_from": evict_from,
        "trace": _trace(config, given),
    }
    values["exact"] = _exact(config, given)
    if values["exact"]:
        values |= _NOTHING_EVICTED
        if fraction == 1.0 and "kv_budget" not in given:
            values["fraction"] = EXACT_SHARE
    budget = RequestBudget(**values)
    config.check_policy(
        policy,
        settle=budget.settle,
        prefill=budget.prefill,
        heads=budget.heads,
        evicts=budget.evicts,
    )
    return budget


_NOTHING_EVICTED = {
    each.name: each.default
    for each in fields(RequestBudget)
    if each.default is not MISSING and each.name != "exact"
}
"""Attributes of the budget of a request that keeps all its KV; they override the server's defaults."""


def resolve_for(
    config: H2OConfig, asked: Mapping[str, Any] | None, prompt_tokens: int
) -> RequestBudget:
    """:func:`resolve`, then :func:`for_prompt`."""
    named = asked is not None and asked.get("kv_protect") is not None
    return for_prompt(config, resolve(config, asked), prompt_tokens, named=named)


def for_prompt(
    config: H2OConfig, budget: RequestBudget, prompt_tokens: int, *, named: bool
) -> RequestBudget:
    """The final budget for a prompt of known length: ``protect`` is a number, ``recent`` has its value.

    At most the prompt is protected, or what is before a ``kv_evict_from`` inside it. A default of ``system``
    or ``task`` protects nothing here: a server replaces it by a number in every chat that has such messages.

    Args:
        named: whether the request names ``kv_protect``.

    Raises:
        BudgetError: ``"system"`` or ``"task"`` is asked for; or ``"prompt"``, and it is too long.
    """
    protect, end, limit = budget.protect, 0, config.protect_limit
    prompt_tokens = budget.context(prompt_tokens)
    if protect == "prompt":
        if named and limit is not None and prompt_tokens > limit:
            accepted = f"at most {limit} tokens here (the prompt has {prompt_tokens})"
            raise BudgetError("kv_protect", protect, accepted)
        protect = prompt_tokens if limit is None else limit
    elif protect == "ends":
        # Segments are found again only after the same protected tokens, and the prompt of a chat grows.
        matters = budget.evicts and not budget.settle
        short = config.short_prompt
        protect = prompt_tokens if matters else 0
        if protect > short:
            protect = min(1, short)
            end = short - protect
    elif protect in ROLE_WORDS:
        if named:
            accepted = "a number, 'prompt' or 'ends' here: only a chat on a server has roles"
            raise BudgetError("kv_protect", protect, accepted)
        protect = 0
    protect = min(int(protect), prompt_tokens)
    recent = budget.recent_of_answers if end or protect == prompt_tokens else budget.recent
    return replace(budget, protect=protect, end=end, recent=recent)


def _budget(config: H2OConfig, given: Mapping[str, Any]) -> tuple[float, int | None]:
    """``fraction`` and ``tokens`` of a :class:`RequestBudget`."""
    if "kv_budget" in given:
        return _checked(config, "kv_budget", given["kv_budget"]), None
    if "kv_budget_tokens" in given:
        return config.kv_budget, _checked(config, "kv_budget_tokens", given["kv_budget_tokens"])
    return config.kv_budget, config.kv_budget_tokens


def _policy(config: H2OConfig, given: Mapping[str, Any]) -> tuple[Policy, int]:
    """``policy`` and ``settle`` of a :class:`RequestBudget`.

    A field of the request overrides a default that it excludes: a default for settling, or, if the request
    names ``kv_settle_tokens``, defaults that exclude settling.
    """
    name, asked = "kv_settle_tokens", given.get("kv_policy")
    settle: int = _checked(config, name, given.get(name, config.kv_settle_tokens))
    if name not in given and excluding(name, given):
        settle = 0
    prefill = given.get("kv_prefill_tokens", 0 if settle else config.kv_prefill_tokens)
    policy = config.policy_of(asked, prefill, settle)
    if settle and name not in given and policy.no_settling_reason:
        return config.policy_of(asked, prefill, 0), 0
    return policy, settle


def _exact(config: H2OConfig, given: Mapping[str, Any]) -> bool:
    """Whether the request is exact. A field about evictions overrides a default of ``--kv-exact``."""
    name = "kv_exact"
    if not _checked(config, name, given.get(name, config.kv_exact)):
        return False
    how = next((f for f, value in given.items() if FIELDS[f].says_how and value != "auto"), None)
    if name not in given:
        return how is None and not excluding(name, given)
    reason = config.no_exact_reason
    if not reason and not config.exact_drafts:
        reason = "it was started without --kv-exact and --kv-exact-drafts"
    if reason:
        raise BudgetError(name, True, f"false on this server ({reason})")
    if config.kv_budget_max < 1.0:
        raise BudgetError(name, True, f"false {_bounded_server(config)}")
    if how is not None:
        raise BudgetError(name, True, f"false with {how}: an exact request evicts nothing")
    return True


def _begin(config: H2OConfig, given: Mapping[str, Any], *, default: bool) -> tuple[bool, int]:
    """When evictions begin: ``elastic`` and ``evict_from`` of a :class:`RequestBudget`.

    A server that limits budgets lets a request keep all tokens for a while only if its options say so.

    Args:
        default: ``kv_elastic`` of a request that names neither field.
    """
    elastic = _checked(config, "kv_elastic", given.get("kv_elastic", default))
    bounded = config.kv_budget_max < 1.0
    if elastic and bounded and not config.kv_elastic:
        raise BudgetError("kv_elastic", True, f"false {_bounded_server(config)}")
    if "kv_evict_from" not in given:
        return elastic, 0
    evict_from = _checked(config, "kv_evict_from", given["kv_evict_from"])
    if bounded:
        raise BudgetError("kv_evict_from", evict_from, f"left out {_bounded_server(config)}")
    return False, evict_from


def _checked(config: H2OConfig, name: str, value: Any) -> Any:
    """``value``, checked against the type of the field and its range on this server."""
    return FIELDS[name].check(value, *config.range_of(name))


def _bounded_server(config: H2OConfig) -> str:
    return f"on this server (its kv_budget_max is {config.kv_budget_max})"


def _trace(config: H2OConfig, given: Mapping[str, Any]) -> bool:
    trace: bool = _checked(config, "kv_trace", given.get("kv_trace", False))
    if trace and not config.kv_trace:
        accepted = "false on this server (--kv-trace or --kv-playground allows it, on CPUs, in one process)"
        raise BudgetError("kv_trace", True, accepted)
    return trace
