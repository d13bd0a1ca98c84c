# SPDX-License-Identifier: Apache-2.0
"""The tokens that the system part of a chat becomes, for any chat template. API-server process.

vLLM renders the part in front of two different messages; the common beginning of the two prompts is the part.
A request protects the beginning that its prompt has in common with it, so a clock in the template ends the
protection at the first digit that has changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from h2o_vllm.errors import BudgetError
from h2o_vllm.server.system_part import USERS, Kind, SystemPart, system_parts

if TYPE_CHECKING:
    from vllm.entrypoints.scale_out.render.serving import ServingRender

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
        accepted = f"a number, 'prompt' or 'short' here: '{word}' {self.failure}"
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


def vllm_render(rendering: ServingRender | None) -> Render:
    """Renders as vLLM's ``.../render`` routes do, also on servers without these routes."""
    if rendering is None:
        return _render_nothing
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


async def _render_nothing(kind: Kind, body: Mapping[str, Any]) -> array[int]:
    del kind, body
    raise ValueError("this server renders no chats")
