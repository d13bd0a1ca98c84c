# SPDX-License-Identifier: Apache-2.0
"""The tokens that the system part of a chat becomes, for any chat template. API-server process.

vLLM renders the part in front of two user messages that have nothing in common. What the two prompts begin
with is the part, with whatever the template puts around it. A third prompt, with the part's last letter
changed, tells whether the part is in there at all: a template may drop it, or put it behind the user's words.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from h2o_vllm.server.system_part import Kind, SystemPart

if TYPE_CHECKING:
    from vllm.entrypoints.scale_out.render.serving import ServingRender

__all__ = ["Render", "SystemPrefix", "SystemPrefixes", "common_tokens", "vllm_render"]

MAX_TOKENS = 1 << 21
"""Of all prefixes that are remembered, at four bytes each."""

MAX_PARTS = 1 << 14
"""Of which prefixes are remembered, or that they have none, which takes no tokens."""

NOT_FIRST = "the chat template of this model does not begin with them"

Render = Callable[[Kind, Mapping[str, Any]], Awaitable["array[int]"]]
"""Token ids of the prompt that a request body becomes. Raises ``ValueError`` if it cannot be rendered."""


@dataclass(frozen=True)
class SystemPrefix:
    """What a prompt with a certain system part begins with.

    Attributes:
        tokens: up to the user's words.
        needed: tokens up to the last letter of the part: a prompt that has fewer of ``tokens`` in common
            does not begin with it.
        failure: why there is none.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    needed: int = 0
    failure: str | None = None

    def length_in(self, prompt: array[int] | list[int]) -> int | None:
        """How many of a prompt's first tokens are the part; ``None`` if the part is not there."""
        if self.failure is not None:
            return None
        length = common_tokens(self.tokens, array("i", prompt[: len(self.tokens)]))
        return length if length >= self.needed else None


class SystemPrefixes:
    """Finds prefixes and remembers them.

    Args:
        render: what vLLM would make of a request.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: OrderedDict[bytes, SystemPrefix] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[SystemPrefix]] = {}
        self._tokens = 0

    async def find(self, part: SystemPart) -> SystemPrefix:
        """The prefix of ``part``, measured once however many ask at the same time. Never raises."""
        try:
            key = _key(part)
        except (RecursionError, ValueError) as error:
            return SystemPrefix(failure=str(error))
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(self._measure_and_keep(key, part))
        # The client that came first may leave; others wait for the same.
        return await asyncio.shield(task)

    async def _measure_and_keep(self, key: bytes, part: SystemPart) -> SystemPrefix:
        try:
            found = await self._measure(part)
        except Exception as error:  # noqa: BLE001 - templates raise what they like
            return SystemPrefix(failure=str(error) or type(error).__name__)
        finally:
            del self._running[key]
        self._known[key] = found
        self._tokens += len(found.tokens)
        while self._tokens > MAX_TOKENS or len(self._known) > MAX_PARTS:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.tokens)
        return found

    async def _measure(self, part: SystemPart) -> SystemPrefix:
        one = await self._render(part.kind, part.body())
        length = common_tokens(one, await self._render(part.kind, part.other_user()))
        needed = 0
        for is_tool, body in ((False, part.other_text()), (True, part.other_tool())):
            if body is None:
                continue
            other = await self._render(part.kind, body)
            if is_tool and other == one:
                # Many templates know nothing of tools: there is nothing of them to protect.
                continue
            needed = max(needed, common_tokens(one, other))
        if not 0 < needed <= length:
            return SystemPrefix(failure=NOT_FIRST)
        return SystemPrefix(one[:length], needed)


def common_tokens(one: array[int], two: array[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(two))
    if one[:shorter] == two[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != two[at])


def vllm_render(rendering: ServingRender | None) -> Render:
    """By what vLLM's own ``.../render`` routes call, whether or not the server shows them."""
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


def _key(part: SystemPart) -> bytes:
    """Equal for parts that are rendered alike. By day, because templates may write the date."""
    today = datetime.datetime.now().astimezone().date().isoformat()
    text = json.dumps([today, part.kind, part.body()], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
