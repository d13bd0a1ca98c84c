# SPDX-License-Identifier: Apache-2.0
"""Limits and words of the request fields, and checks of their combinations.

Runs in every process; imports :mod:`h2o_vllm.errors` and the policies. :mod:`h2o_vllm.config.settings` checks
types and ranges; the checks here compare a field with the policy or the engine.
"""

from __future__ import annotations

from h2o_vllm.errors import BudgetError
from h2o_vllm.policy.policy import Policy

HEADS = ("equal", "shared")
"""Values of ``kv_heads``: all KV heads of a layer keep equally many tokens, or they share its heavy slots."""

ROLE_WORDS = ("system", "task")
"""Values of ``kv_protect`` for chats: the system messages and tool definitions; or these and the first user
message. Only a server knows roles; it replaces the word by a number."""

PROTECT_WORDS = ("prompt", *ROLE_WORDS, "short")
"""Values of ``kv_protect`` other than a number: the whole prompt; a part by roles; or the whole prompt if it
has at most :data:`SHORT_PROMPT` times the floor, otherwise nothing."""

SHORT_PROMPT = 4
"""Longest short prompt, in multiples of ``--kv-min-tokens``: 512 tokens by default."""

FEW_PROTECTED = 1024
"""Most tokens that a request may protect if the operator limits budgets and does not set --kv-protect-max."""

EXACT_SHARE = 0.1
"""Share of an exact request's tokens that drafts attend to, if the request names no budget."""

MAX_DELAY = 256
"""Largest ``kv_delay``: a request holds more than ``kv_budget_max`` until its first eviction."""

MAX_TRACE_TOKENS = 4096
"""Most tokens, prompt and answer, of a request with ``kv_trace``. A trace takes two bytes per token, layer
and KV head while the request runs."""


def check_heads(heads: str, policy: Policy, equal_heads_reason: str) -> None:
    """Check that policy and engine let heads share slots; ``equal_heads_reason``: why the engine does not.

    Raises:
        BudgetError: they do not.
    """
    if heads != "shared":
        return
    if equal_heads_reason:
        raise BudgetError("kv_heads", heads, f"equal on this server ({equal_heads_reason})")
    if policy.equal_heads_reason:
        accepted = f"equal with kv_policy {policy.name}, {policy.equal_heads_reason}"
        raise BudgetError("kv_heads", heads, accepted)


def check_prefill(tokens: int, policy: Policy) -> None:
    """Check ``kv_prefill_tokens``: it must be 0 if ``policy`` ranks by the end of the prompt.

    Raises:
        BudgetError: it is not 0.
    """
    if tokens and not policy.may_bound:
        accepted = (
            f"0 with kv_policy {policy.name}, which has nothing to rank by before the prompt's end"
        )
        raise BudgetError("kv_prefill_tokens", tokens, accepted)


def check_scores(policy: Policy, reason: str) -> None:
    """Check that the engine collects the attention that ``policy`` needs; ``reason``: why it does not.

    Raises:
        BudgetError: the policy collects attention.
    """
    if reason and policy.needs_scores:
        accepted = (
            f"one that collects no attention on this server ({reason}); 'later', 'window' and 'random' "
            "collect none"
        )
        raise BudgetError("kv_policy", policy.name, accepted)


def check_settle(tokens: int, policy: Policy) -> None:
    """Check ``kv_settle_tokens``: it must be 0 if segments cannot settle with ``policy``.

    Raises:
        BudgetError: it is not 0.
    """
    if tokens and policy.no_settling_reason:
        raise BudgetError("kv_settle_tokens", tokens, f"0 {policy.no_settling_reason}")
