# SPDX-License-Identifier: Apache-2.0
"""The system part of a chat, its system messages and tools, and the tokens it becomes. API-server process.

With ``kv_protect`` ``"task"`` the user's first message belongs to it as well. Chat templates differ, so the
part is not searched for in a prompt: vLLM renders it in front of two different messages, and the common
beginning of the two prompts is the part. A request protects the beginning that its prompt has in common with
it, so a clock in the template ends the protection at the first digit that has changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from h2o_vllm.errors import BudgetError

if TYPE_CHECKING:
    from vllm.entrypoints.scale_out.render.serving import ServingRender

Kind = str
"""The protocol of a body: ``chat``, ``responses`` or ``messages``."""

KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""Routes with requests that have roles."""

SYSTEM_ROLES = ("system", "developer")
USERS = ("Apple", "zebra")
"""Two messages without a common first letter."""


@dataclass(frozen=True)
class SystemPart:
    """The system part of one chat.

    Attributes:
        kind: the protocol of the bodies.
        fields: of the request, without its turns.
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
    # vLLM renders no request that goes on from an earlier response.
    fields = {name: value for name, value in request.items() if name != "previous_response_id"}
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


NEEDS = {
    "system": "needs a system message or tools at the beginning of the chat",
    "task": "needs a system message, tools or a message of the user at the beginning of the chat",
}
"""What each word requires."""
NOT_FIRST = "is not found: the chat template of this model does not begin with it"

Render = Callable[[Kind, Mapping[str, Any]], Awaitable["array[int]"]]
"""Token ids of the prompt that a request body becomes. Raises ``ValueError`` if it cannot be rendered."""


@dataclass(frozen=True)
class SystemPrefix:
    """The beginning of prompts with a certain system part.

    Attributes:
        tokens: up to the user's words.
        failure: why there are no tokens.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    failure: str | None = None

    @property
    def is_missing(self) -> bool:
        """Whether the request has no such part."""
        return self.failure in (NO_ROLES.failure, *NEEDS.values())

    def error(self, word: str) -> BudgetError:
        """Why ``kv_protect`` cannot be this word here."""
        accepted = f"a number, 'prompt' or 'ends' here: '{word}' {self.failure}"
        return BudgetError("kv_protect", word, accepted)

    def length_in(self, prompt: array[int] | list[int]) -> int:
        """Number of first tokens that a prompt shares with the part."""
        return common_tokens(self.tokens, array("i", prompt[: len(self.tokens)]))


NO_ROLES = SystemPrefix(
    failure="is in chats only: the prompts of this route have no system messages"
)


async def system_prefixes(
    render: Render, path: str, request: Mapping[str, Any], word: str
) -> list[SystemPrefix]:
    """The prefix of each chat of a request that protects ``word``. Never raises.

    If a part cannot be rendered, neither can the request in most cases, and vLLM says why.
    """
    parts = system_parts(path, request, task=word == "task")
    if not parts:
        return [NO_ROLES if parts is None else SystemPrefix(failure=NEEDS[word])]
    return [
        SystemPrefix(failure=NEEDS[word]) if part.is_empty else await _prefix(render, part)
        for part in parts
    ]


async def _prefix(render: Render, part: SystemPart) -> SystemPrefix:
    try:
        one, two = [await render(part.kind, part.body(user)) for user in USERS]
    except Exception as error:  # noqa: BLE001 - templates raise what they like
        return SystemPrefix(failure=f"is not found: {str(error) or type(error).__name__}")
    length = common_tokens(one, two)
    return SystemPrefix(one[:length], None if length else NOT_FIRST)


def common_tokens(one: array[int], two: array[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(one), len(two))
    if one[:shorter] == two[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != two[at])


def vllm_render(rendering: ServingRender) -> Render:
    """Renders as vLLM's ``.../render`` routes do, also on servers without these routes."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    async def render(kind: Kind, body: Mapping[str, Any]) -> array[int]:
        if kind == "chat":
            chat = ChatCompletionRequest.model_validate(body)
            rendered = await rendering.render_chat_request(chat)
        elif kind == "responses":
            response = ResponsesRequest.model_validate(body)
            rendered = await rendering.render_responses_request(response)
        else:
            message = AnthropicMessagesRequest.model_validate(body)
            rendered = await rendering.render_messages_request(message)
        if isinstance(rendered, ErrorResponse):
            raise ValueError(rendered.error.message)  # noqa: TRY004 - the request's fault
        return array("i", rendered.token_ids)

    return render
