# SPDX-License-Identifier: Apache-2.0
"""The system part of a request's chats: its system messages and tool definitions. Imports nothing of vLLM.

With ``kv_protect`` ``"task"`` the user's first message belongs to it as well.

API-server process. Chat templates differ, so the part is not searched for in a prompt: it is rendered in
front of two different messages, and the common beginning of both prompts is the part
(:mod:`h2o_vllm.server.system_prefix`). This module makes the bodies to render.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Kind = str
"""The protocol of a body: ``chat``, ``responses`` or ``messages``."""

KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""Routes with requests that have roles."""

RENDERED = {
    "chat": (
        "model", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents",
        "reasoning_effort", "add_special_tokens",
    ),
    "responses": (
        "model", "tools", "tool_choice", "chat_template_kwargs", "reasoning", "instructions",
    ),
    "messages": (
        "model", "max_tokens", "tools", "tool_choice", "chat_template_kwargs", "thinking", "output_config",
        "system",
    ),
}  # fmt: skip
"""Fields that the beginning of a prompt depends on, or that rendering requires."""

SYSTEM_ROLES = ("system", "developer")
USERS = ("Apple", "zebra")
"""Two messages without a common first letter."""


@dataclass(frozen=True)
class SystemPart:
    """The system part of one chat.

    Attributes:
        kind: the protocol of the bodies.
        fields: of the request, those in :data:`RENDERED`.
        head: the system messages that the chat begins with.
        task: the user's first message, if it belongs to the part as well.
    """

    kind: Kind
    fields: Mapping[str, Any]
    head: Sequence[Mapping[str, Any]]
    task: Mapping[str, Any] | None = None

    def body(self, word: str) -> dict[str, Any]:
        """A request of this part and one message of the user, ``word``."""
        turns: list[Mapping[str, Any]] = [*self.head, {"role": "user", "content": word}]
        if self.task is not None:
            # A template may want the last message to be the user's.
            turns[-1:] = [self.task, {"role": "assistant", "content": word}, turns[-1]]
        return {**self.fields, "input" if self.kind == "responses" else "messages": turns}

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a system text nor a tool nor a task."""
        if self.task is not None:
            return False
        texts = [message.get("content") for message in self.head]
        texts += [self.fields.get(name) for name in ("system", "instructions")]
        return not any(map(_has_text, texts)) and not self.fields.get("tools")


def system_parts(
    path: str, request: Mapping[str, Any], *, task: bool = False
) -> list[SystemPart] | None:
    """The system part of each chat of a request, with its ``task`` if wanted; ``None`` if it has no roles."""
    kind = KINDS.get(path)
    if path == "/invocations" and "messages" in request:
        # SageMaker's one route for all: vLLM goes by the fields.
        kind = "chat"
    if kind is None:
        return None
    fields = {name: request[name] for name in RENDERED[kind] if request.get(name) is not None}
    turns = request.get("input" if kind == "responses" else "messages")
    if path.endswith("/batch"):
        chats = turns if isinstance(turns, list) else []
        return [_part(kind, fields, chat, task=task) for chat in chats]
    if kind == "responses" and request.get("previous_response_id") is not None:
        # The earlier turns come before these.
        turns = None
    return [_part(kind, fields, turns, task=task)]


def _part(kind: Kind, fields: Mapping[str, Any], turns: Any, *, task: bool) -> SystemPart:
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    head = _head(turns)
    behind = turns[len(head) :] if task and isinstance(turns, list) else []
    first = behind[0] if behind and isinstance(behind[0], dict) else {}
    is_task = first.get("role") == "user" and _has_text(first.get("content"))
    return SystemPart(kind, fields, head, first if is_task else None)


def _head(turns: Any) -> list[Mapping[str, Any]]:
    """The leading system messages."""
    head: list[Mapping[str, Any]] = []
    for turn in turns if isinstance(turns, list) else []:
        if not isinstance(turn, dict) or turn.get("role") not in SYSTEM_ROLES:
            break
        head.append(turn)
    return head


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(isinstance(part, dict) and _has_text(part.get("text")) for part in content)
    return isinstance(content, str) and bool(content.strip())
