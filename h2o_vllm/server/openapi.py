# SPDX-License-Identifier: Apache-2.0
"""The budget fields on the server's own API page (``/openapi.json``, ``/docs``). API-server process.

vLLM's request models do not know them. FastAPI's way to say more than its models: wrap the application's
``openapi`` method, whose result it keeps.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field, create_model

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import HEADS, MAX_DELAY, PROTECT_WORDS
from h2o_vllm.policy.policy import policy_pattern
from h2o_vllm.server.routes import LIFTED

__all__ = ["describe_fields", "fields_of"]


def fields_of(config: H2OConfig) -> dict[str, Any]:
    """JSON schema of each budget field, with this server's ranges and defaults."""
    low, high = config.kv_budget_min, config.kv_budget_max
    most, policy = config.protect_limit, config.default_policy
    fields: dict[str, Any] = {
        "kv_budget": _field(
            float, config.kv_budget, "Share of its tokens the request keeps.", ge=low, le=high
        ),
        "kv_budget_tokens": _field(
            int, config.kv_budget_tokens, "A number of tokens to keep instead.", ge=1
        ),
        "kv_recent": _field(
            float, config.recent_of(policy), "Share of the budget for the newest tokens.",
            ge=0, le=1,
        ),
        "kv_policy": _field(
            str, policy.name, "Which tokens stay beside the newest: a preset, or ranks joined by '+'.",
            pattern=policy_pattern(calibrated=config.calibrated),
        ),
        "kv_heads": _field(
            Literal[HEADS], config.heads_of(policy),
            "Whether all KV heads of a layer keep as many tokens, or share its slots by need."
            + (f" Here equal: {config.kv_heads_equal_because}." if config.kv_heads_equal_because else ""),
        ),
        "kv_protect": _field(
            int | Literal[PROTECT_WORDS], config.protect_of(policy),
            "First tokens that the budget leaves alone, shared and read from the prefix cache: a number"
            f"{'' if most is None else f' up to {most}'}, the whole prompt, or system messages and tools.",
        ),
        "kv_delay": _field(
            int, config.kv_delay, "Generated tokens before the first eviction.", ge=0, le=MAX_DELAY
        ),
        "kv_elastic": _field(
            bool, config.kv_elastic, "Keep everything until memory is short; the budget is the floor."
        ),
        "kv_prefill_tokens": _field(
            int, config.kv_prefill_tokens,
            "Unprotected tokens the prompt may hold while it is computed; 0: all it has.", ge=0,
        ),
        "kv_evict_from": _field(
            int, None, "For tests: evict nothing before this many tokens have been seen.", ge=1
        ),
        "kv_trace": _field(
            bool, False, "Report which positions each layer and KV head holds; where the server lets one ask."
        ),
    }  # fmt: skip
    model: type[BaseModel] = create_model("KVBudget", **fields)
    found: dict[str, Any] = model.model_json_schema()["properties"]
    return found


def describe_fields(application: FastAPI, config: H2OConfig) -> None:
    """Add the fields to the request bodies of the routes that take them."""
    made = application.openapi
    fields = fields_of(config)

    def with_fields() -> dict[str, Any]:
        page = made()
        for schema in _bodies(page):
            schema.setdefault("properties", {}).update(fields)
        return page

    application.openapi = with_fields  # type: ignore[method-assign]


def _field(
    kind: Any, default: Any, text: str, ge: float | None = None, le: float | None = None,
    pattern: str | None = None,
) -> Any:  # fmt: skip
    return kind | None, Field(default, description=text, ge=ge, le=le, pattern=pattern)


def _bodies(page: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the bodies that may carry the fields; ``/invocations`` says nothing of its own."""
    schemas = page.get("components", {}).get("schemas", {})
    found = []
    for path in sorted(LIFTED):
        body = page["paths"].get(path, {}).get("post", {}).get("requestBody", {})
        schema = body.get("content", {}).get("application/json", {}).get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        if name in schemas:
            found.append(schemas[name])
    return found
