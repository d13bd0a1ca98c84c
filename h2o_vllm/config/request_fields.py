# SPDX-License-Identifier: Apache-2.0
"""Limits and words of the request fields. Runs in every process; imports nothing."""

HEADS = ("equal", "shared")
"""Values of ``kv_heads``: all KV heads of a layer keep equally many tokens, or they share its heavy slots."""

ROLE_WORDS = ("system", "task")
"""Values of ``kv_protect`` for chats: the system messages and tool definitions; or these and the first user
message. Only a server knows roles; it replaces the word by a number."""

PROTECT_WORDS = ("prompt", *ROLE_WORDS, "ends")
"""Values of ``kv_protect`` other than a number: the whole prompt; a part by roles; or its first block
and its end, which is the whole prompt if it has at most :data:`SHORT_PROMPT` times the floor."""

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
