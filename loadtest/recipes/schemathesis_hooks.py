# SPDX-License-Identifier: Apache-2.0
"""Tells schemathesis of the budget fields, which vLLM's description of its API does not have.

Read by ``schemathesis.sh``. Deliberately without a type: everything is a legal thing to try.
"""

from __future__ import annotations

from typing import Any

import schemathesis

FIELDS = (
    "kv_budget", "kv_budget_tokens", "kv_recent", "kv_policy", "kv_protect", "kv_delay",
    "kv_elastic", "kv_evict_from",
)  # fmt: skip
REQUESTS = (
    "CompletionRequest",
    "ChatCompletionRequest",
    "ResponsesRequest",
    "AnthropicMessagesRequest",
)


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:  # noqa: ARG001 - the hook's
    """Add the fields to the bodies that may carry them."""
    schemas = raw_schema["components"]["schemas"]
    for name in REQUESTS:
        schemas[name]["properties"].update({field: {} for field in FIELDS})
        # A long answer says nothing that a short one does not.
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if limit in schemas[name]["properties"]:
                schemas[name]["properties"][limit] = {"enum": [1, 2, 0, -1]}
