# SPDX-License-Identifier: Apache-2.0
"""The system part of a request's chats: its system messages and tool definitions. Imports nothing of vLLM.

API-server process. Which tokens that part becomes is the chat template's business, and templates differ. So
nobody looks for it in a prompt: the same part is rendered in front of different user messages, and what the
prompts have in common is the part (:mod:`h2o_vllm.server.system_prefix`). Here are the bodies to render.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RENDERED", "Kind", "SystemPart", "kind_of", "system_parts"]

Kind = str
"""Whose protocol a body follows: ``chat``, ``responses`` or ``messages``."""

KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""Routes whose requests have roles."""

RENDERED = {
    "chat": (
        "model", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents",
        "reasoning_effort", "add_special_tokens",
    ),
    "responses": (
        "model", "tools", "tool_choice", "chat_template_kwargs", "reasoning", "instructions",
    ),
    "messages": (
        "model", "tools", "tool_choice", "chat_template_kwargs", "thinking", "output_config", "system",
    ),
}  # fmt: skip
"""Fields that decide how the beginning of a prompt is rendered."""

SYSTEM_ROLES = ("system", "developer")
USERS = ("Apple", "zebra")
"""What the user says in the prompts to compare: nothing in common from the first letter on."""

BILLING = "x-anthropic-billing-header"
"""vLLM drops blocks that begin with this from a system prompt (0.32)."""


@dataclass(frozen=True)
class SystemPart:
    """The system part of one chat.

    Attributes:
        kind: whose protocol the bodies follow.
        fields: of the request, those that decide how it is rendered.
        head: the system messages that the chat begins with.
    """

    kind: Kind
    fields: Mapping[str, Any]
    head: Sequence[Mapping[str, Any]]

    def body(self, user: str = USERS[0]) -> dict[str, Any]:
        """A request of this part and one user message."""
        turns = [*self.head, {"role": "user", "content": user}]
        return {**self.fields, "input" if self.kind == "responses" else "messages": turns}

    def other_user(self) -> dict[str, Any]:
        """As :meth:`body`, with a user who says something else."""
        return self.body(USERS[1])

    def other_text(self) -> dict[str, Any] | None:
        """As :meth:`body`, with the last letter of the system text changed."""
        text = self._with_other_text()
        return None if text is None else text.body()

    def other_tool(self) -> dict[str, Any] | None:
        """As :meth:`body`, with another last tool."""
        tools = _tools(self.fields)
        if not tools:
            return None
        fields = {**self.fields, "tools": [*tools[:-1], _other_tool(tools[-1])]}
        return SystemPart(self.kind, fields, self.head).body()

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a system text nor a tool."""
        return self._with_other_text() is None and not _tools(self.fields)

    def _with_other_text(self) -> SystemPart | None:
        for at in reversed(range(len(self.head))):
            message = self.head[at]
            content = _last_letter_changed(message.get("content"))
            if content is not None:
                head = [*self.head[:at], {**message, "content": content}, *self.head[at + 1 :]]
                return SystemPart(self.kind, self.fields, head)
        for name in ("system", "instructions"):
            content = _last_letter_changed(self.fields.get(name))
            if content is not None:
                return SystemPart(self.kind, {**self.fields, name: content}, self.head)
        return None


def kind_of(path: str, request: Mapping[str, Any]) -> Kind | None:
    """The protocol of a request, or ``None`` if it has no roles."""
    if path == "/invocations":
        # SageMaker's one route for all: vLLM goes by the fields.
        return "chat" if "messages" in request else None
    return KINDS.get(path)


def system_parts(path: str, request: Mapping[str, Any]) -> list[SystemPart] | None:
    """The system part of each chat of a request; ``None`` if the route has no roles."""
    kind = kind_of(path, request)
    if kind is None:
        return None
    fields = {name: request[name] for name in RENDERED[kind] if request.get(name) is not None}
    if kind == "messages":
        fields["max_tokens"] = _enough_to_think(fields.get("thinking"))
    turns = request.get("input" if kind == "responses" else "messages")
    if path.endswith("/batch"):
        chats = turns if isinstance(turns, list) else []
        return [SystemPart(kind, fields, _head(chat)) for chat in chats]
    if kind == "responses" and request.get("previous_response_id") is not None:
        # The earlier turns come before these.
        turns = None
    return [SystemPart(kind, fields, _head(turns))]


def _head(turns: Any) -> list[Mapping[str, Any]]:
    """The system messages in front of all others."""
    head: list[Mapping[str, Any]] = []
    for turn in turns if isinstance(turns, list) else []:
        if not isinstance(turn, dict) or turn.get("role") not in SYSTEM_ROLES:
            break
        head.append(turn)
    return head


def _tools(fields: Mapping[str, Any]) -> list[Any]:
    tools = fields.get("tools")
    return tools if isinstance(tools, list) else []


def _enough_to_think(thinking: Any) -> int:
    """A ``max_tokens`` that vLLM takes: it has to be larger than the budget for thinking."""
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return budget + 1 if type(budget) is int else 1


def _last_letter_changed(content: Any) -> Any:
    """``content`` with another last letter; ``None`` if it has no text."""
    if isinstance(content, str):
        # Templates strip what is white at the end.
        text = content.rstrip()
        return text[:-1] + ("y" if text.endswith("x") else "x") if text else None
    if isinstance(content, list):
        for at in reversed(range(len(content))):
            part = content[at]
            said = part.get("text") if isinstance(part, dict) else None
            if isinstance(said, str) and not said.startswith(BILLING):
                other = _last_letter_changed(said)
                if other is not None:
                    return [*content[:at], {**part, "text": other}, *content[at + 1 :]]
    return None


def _other_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _other_tool(tool["function"])}
    description = tool.get("description")
    return {**tool, "description": f"{description} x" if isinstance(description, str) else "x"}
