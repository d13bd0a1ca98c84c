# SPDX-License-Identifier: Apache-2.0
"""The budget fields of a request: their names, and the values of those that are also a server's defaults.

Runs in every process; imports :mod:`h2o_vllm.checks`, :mod:`h2o_vllm.errors` and the policies. The
checks here know more than a value's type and range; each returns the value.
"""

from __future__ import annotations

from typing import Any

from h2o_vllm.checks import check_choice, check_integer
from h2o_vllm.errors import BudgetError
from h2o_vllm.policy.policy import Policy

__all__ = [
    "HEADS",
    "MAX_DELAY",
    "MAX_TRACE_TOKENS",
    "PROTECT_WORDS",
    "REQUEST_FIELDS",
    "TESTING_FIELDS",
    "check_heads",
    "check_prefill",
    "check_protect",
]

REQUEST_FIELDS = (
    "kv_budget",
    "kv_budget_tokens",
    "kv_recent",
    "kv_policy",
    "kv_heads",
    "kv_protect",
    "kv_delay",
    "kv_elastic",
    "kv_prefill_tokens",
    "kv_evict_from",
    "kv_trace",
)
"""Request fields, accepted at the top level of a body and inside ``vllm_xargs``."""

TESTING_FIELDS = ("kv_evict_from", "kv_trace")
"""Those of them that help to test, to debug and to see; a server has no default for them."""

HEADS = ("equal", "shared")
"""What ``kv_heads`` may be: all KV heads of a layer keep as many tokens, or they share its heavy slots."""

PROTECT_WORDS = ("prompt", "system")
"""What ``kv_protect`` may be beside a number of first tokens: all of the prompt, or its system messages and
tool definitions. Only a server knows roles: it puts a number in the place of ``"system"``."""

FEW_PROTECTED = 1024
"""Tokens a request may protect where an operator bounds budgets and says nothing of protection."""

REMOVED_FIELDS = {
    "kv_sinks": "it was removed; kv_protect keeps a number of first tokens, in whole blocks beside the budget"
}
"""Fields and options of earlier releases, and what replaces each."""

MAX_DELAY = 256
"""While an eviction is delayed, a request holds more than ``kv_budget_max`` says: not for long."""

MAX_TRACE_TOKENS = 4096
"""Most tokens, prompt and answer, of a request that asks for a trace: it costs two bytes per token, layer and
KV head while the request runs, and is read by people."""


def check_heads(value: Any, policy: Policy, equal_because: str) -> str:
    """One of :data:`HEADS`; ``equal`` only with some policies, or if ``equal_because`` says why.

    Raises:
        BudgetError: it is none. As all of these.
    """
    heads = check_choice("kv_heads", value, HEADS)
    if heads == "shared" and equal_because:
        raise BudgetError("kv_heads", heads, f"equal on this server ({equal_because})")
    if heads == "shared" and policy.equal_because:
        accepted = f"equal with kv_policy {policy.name}, {policy.equal_because}"
        raise BudgetError("kv_heads", heads, accepted)
    return heads


def check_prefill(value: Any, policy: Policy) -> int:
    """Tokens that a prompt may hold while it is computed; 0, no bound, where ``policy`` needs its end."""
    tokens = check_integer("kv_prefill_tokens", value, 0)
    if tokens and not policy.may_bound:
        accepted = (
            f"0 with kv_policy {policy.name}, which has nothing to rank by before the prompt's end"
        )
        raise BudgetError("kv_prefill_tokens", tokens, accepted)
    return tokens


def check_protect(value: Any, limit: int) -> int | str:
    """A number of first tokens up to ``limit``, or one of :data:`PROTECT_WORDS`."""
    if isinstance(value, str) and value in PROTECT_WORDS:
        return value
    try:
        return check_integer("kv_protect", value, 0, limit)
    except BudgetError as error:
        words = " or ".join(f"'{word}'" for word in PROTECT_WORDS)
        raise BudgetError("kv_protect", value, f"{error.accepted}, {words}") from None
