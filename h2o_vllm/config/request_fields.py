# SPDX-License-Identifier: Apache-2.0
"""Limits and words of the request fields, and what may go with what.

Runs in every process; imports :mod:`h2o_vllm.errors` and the policies. The
checks here know more than type and range, which :mod:`h2o_vllm.config.settings` has; each returns the value.
"""

from __future__ import annotations

from h2o_vllm.errors import BudgetError
from h2o_vllm.policy.policy import Policy

HEADS = ("equal", "shared")
"""What ``kv_heads`` may be: all KV heads of a layer keep as many tokens, or they share its heavy slots."""

ROLE_WORDS = ("system", "task")
"""What ``kv_protect`` may be where a chat has roles: its system messages and tool definitions; or these and
the user's first message. Only a server knows roles: it puts a number in the place of the word."""

PROTECT_WORDS = ("prompt", *ROLE_WORDS, "short")
"""What ``kv_protect`` may be beside a number of first tokens: all of the prompt; a part by roles; or all of a
prompt of at most :data:`SHORT_PROMPT` floors, and nothing of a longer one."""

SHORT_PROMPT = 4
"""How many floors (``--kv-min-tokens``) a short prompt has at most: 512 tokens by default."""

FEW_PROTECTED = 1024
"""Tokens a request may protect where an operator bounds budgets and says nothing of protection."""


WITHOUT_SCORES = "'later', 'window' and 'random' collect none"
"""Presets that serve where no attention is known."""

EXACT_SHARE = 0.1
"""Share of an exact request's tokens that drafts attend to, where no budget is named."""

MAX_DELAY = 256
"""While an eviction is delayed, a request holds more than ``kv_budget_max`` says: not for long."""

MAX_TRACE_TOKENS = 4096
"""Most tokens, prompt and answer, of a request that asks for a trace: it costs two bytes per token, layer and
KV head while the request runs, and is read by people."""


def check_heads(heads: str, policy: Policy, equal_because: str) -> str:
    """``equal`` only with some policies, or if ``equal_because`` says why.

    Raises:
        BudgetError: it is not. As all of these.
    """
    if heads == "shared" and equal_because:
        raise BudgetError("kv_heads", heads, f"equal on this server ({equal_because})")
    if heads == "shared" and policy.equal_because:
        accepted = f"equal with kv_policy {policy.name}, {policy.equal_because}"
        raise BudgetError("kv_heads", heads, accepted)
    return heads


def check_prefill(tokens: int, policy: Policy) -> int:
    """A bound of what a prompt holds; 0, no bound, where ``policy`` needs the prompt's end."""
    if tokens and not policy.may_bound:
        accepted = (
            f"0 with kv_policy {policy.name}, which has nothing to rank by before the prompt's end"
        )
        raise BudgetError("kv_prefill_tokens", tokens, accepted)
    return tokens


def check_scores(policy: Policy, because: str) -> None:
    """Check that the engine knows what ``policy`` ranks by: no attention, if ``because`` says why.

    Raises:
        BudgetError: the policy collects attention.
    """
    if because and policy.needs_scores:
        accepted = f"one that collects no attention on this server ({because}); {WITHOUT_SCORES}"
        raise BudgetError("kv_policy", policy.name, accepted)


def check_ops(policy: Policy, because: str) -> None:
    """Check that the engine's kernels compute what ``policy`` ranks by, if ``because`` says why some may not.

    Raises:
        BudgetError: no kernel computes one of its ranks.
    """
    if because and policy.without_op:
        accepted = f"one without {' and '.join(policy.without_op)} on this server ({because})"
        raise BudgetError("kv_policy", policy.name, accepted)


def check_settle(tokens: int, policy: Policy) -> int:
    """``kv_settle_tokens``, 0 where ``policy`` cannot settle.

    Raises:
        BudgetError: it is not 0.
    """
    if tokens and policy.settles_not_because:
        raise BudgetError("kv_settle_tokens", tokens, f"0 {policy.settles_not_because}")
    return tokens
