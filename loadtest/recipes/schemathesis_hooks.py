# SPDX-License-Identifier: Apache-2.0
"""Lets schemathesis try anything in the budget fields, whatever type the server's description names.

Read by ``schemathesis.sh``.
"""

from __future__ import annotations

from typing import Any

import schemathesis

REQUESTS = (
    "CompletionRequest",
    "ChatCompletionRequest",
    "ResponsesRequest",
    "AnthropicMessagesRequest",
)


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:  # noqa: ARG001 - the hook's
    """Drop the types of the fields."""
    schemas = raw_schema["components"]["schemas"]
    for name in REQUESTS:
        properties = schemas[name]["properties"]
        properties.update({field: {} for field in properties if field.startswith("kv_")})
        # A long answer says nothing that a short one does not.
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if limit in properties:
                properties[limit] = {"enum": [1, 2, 0, -1]}
