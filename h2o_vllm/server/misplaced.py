# SPDX-License-Identifier: Apache-2.0
"""Budget fields that stand where nothing reads them. API-server process; imports no vLLM.

vLLM ignores what it does not know: a literal ``extra_body`` in a body, ``metadata``, a field of a message.
A request that names a budget there would be served without one. What users own is not searched: what
messages say, JSON schemas, documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from h2o_vllm.config.settings import REQUEST_FIELDS

__all__ = ["misplaced"]

_Found = tuple[str, str]

FREE = frozenset({"prompt", "documents", "mm_payload"})
"""Names of values with arbitrary keys. They are not searched."""

SHALLOW = frozenset(
    {
        "messages",
        "input",
        "previous_input_messages",
        "system",
        "tools",
        "functions",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "guided_json",
        "text",
        "output_config",
    }
)
"""Names of objects, or lists of them, whose own keys the API defines, and whose values are the user's:
texts, arguments of calls, schemas. Of these the own keys are searched."""


def _field_name(key: str) -> str | None:
    """The budget field that ``key`` spells, in any case, with hyphens too; ``None``: it is none."""
    name = key.lower().replace("-", "_")
    return name if name in REQUEST_FIELDS else None


def misplaced(request: Mapping[str, Any], read: str = "", query: bytes = b"") -> _Found | None:
    """The first budget field that stands where it has no effect, and where that is.

    Args:
        request: a body. Its own keys are not judged, nor those of the object that it calls ``read``.
        query: the query string of its URL.
    """
    for key, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if (name := _field_name(key)) is not None:
            return name, "the query string"
    # A stack rather than a recursion: a client chooses how deep a body is.
    todo: list[tuple[str, str, Any]] = [("", key, value) for key, value in request.items()]
    while todo:
        above, key, value = todo.pop()
        if key in FREE:
            continue
        if isinstance(value, list):
            todo += [(above, key, each) for each in value if isinstance(each, dict | list)]
        elif isinstance(value, dict):
            where = f"{above}.{key}"[-120:].removeprefix(".")
            for inner, each in value.items():
                name = _field_name(inner)
                if name is not None and each is not None and where != read:
                    return name, where
                if isinstance(each, dict | list) and key not in SHALLOW:
                    todo.append((where, inner, each))
    return None
