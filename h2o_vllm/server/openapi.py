# SPDX-License-Identifier: Apache-2.0
"""The budget fields on the server's own API page (``/openapi.json``, ``/docs``). API-server process.

vLLM's request models lack them, so the application's ``openapi`` method is wrapped, as FastAPI documents it.
"""

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field, create_model

from h2o_vllm.config.fields import MAX_TOKENS
from h2o_vllm.config.fields import Field as Row
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import FIELDS
from h2o_vllm.policy.policy import policy_pattern
from h2o_vllm.server.routes import LIFTED


def fields_of(config: H2OConfig) -> dict[str, Any]:
    """JSON schema of each budget field, with this server's ranges and defaults."""
    defaults = config.applied
    words = {"kv_heads": ("equal",)} if config.equal_heads_reason else {}
    pattern = policy_pattern(**config.accepts)
    policies = Annotated[str, Field(pattern=pattern)]
    fields: dict[str, Any] = {}
    for name, row in FIELDS.items():
        low, high = config.range_of(name)
        kind = kind_of(row, words.get(name, row.words), low, high)
        kind = policies if name == "kv_policy" else kind
        fields[name] = kind | None, Field(defaults.get(name, row.default), description=row.text)
    model: type[BaseModel] = create_model("KVBudget", **fields)
    found: dict[str, Any] = model.model_json_schema()["properties"]
    return found


def kind_of(
    row: Row, words: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """Pydantic type of a field's values, within ``low`` and ``high`` or the row's own range."""
    if row.kind is str:
        return Literal[words] if words else str
    if row.kind is bool:
        return bool
    lowest = {"gt": 0} if row.low_open and low is None else {"ge": row.low if low is None else low}
    most = row.high if high is None else high
    highest = {"le": most} if most < MAX_TOKENS else {}
    number = Annotated[row.kind, Field(**lowest, **highest)]  # type: ignore[name-defined]
    return number | Literal[words] if words else number


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


def _bodies(page: dict[str, Any]) -> list[dict[str, Any]]:
    """Schemas of the bodies of :data:`LIFTED`; ``/invocations`` has none."""
    schemas = page.get("components", {}).get("schemas", {})
    found = []
    for path in sorted(LIFTED):
        body = page["paths"].get(path, {}).get("post", {}).get("requestBody", {})
        schema = body.get("content", {}).get("application/json", {}).get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        if name in schemas:
            found.append(schemas[name])
    return found
