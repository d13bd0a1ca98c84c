# SPDX-License-Identifier: Apache-2.0
"""The tokens that the system part of a chat becomes, for any chat template. API-server process.

vLLM renders the part in front of two messages that have nothing in common. What the two prompts begin
with is the part, with whatever the template puts around it. It is remembered, and each prompt is compared
with it. If a prompt begins otherwise, as with a clock in the template, the part is found anew, and at least
what stands before the difference is protected.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from h2o_vllm.server.protocol import RefusalError
from h2o_vllm.server.system_part import USERS, Kind, SystemPart, system_parts

if TYPE_CHECKING:
    from vllm.entrypoints.scale_out.render.serving import ServingRender

    from h2o_vllm.config.request_budget import RequestBudget

__all__ = [
    "Render",
    "SystemPrefix",
    "SystemPrefixes",
    "SystemTokens",
    "common_tokens",
    "vllm_render",
]

MAX_TOKENS = 1 << 21
"""Of all prefixes that are remembered, at four bytes each."""

MAX_PARTS = 1 << 14
"""Parts with a prefix that is remembered; a part without a prefix counts, too."""

FIELD = "kv_protect"
NEEDS = {
    "system": "a system message or tools at the beginning of the chat",
    "task": "a system message, tools or a message of the user at the beginning of the chat",
}
"""What each word cannot do without."""
NOT_FIRST = "the chat template of this model does not begin with them"

Render = Callable[[Kind, Mapping[str, Any]], Awaitable["array[int]"]]
"""Token ids of the prompt that a request body becomes. Raises ``ValueError`` if it cannot be rendered."""


@dataclass(frozen=True)
class SystemPrefix:
    """What a prompt with a certain system part begins with.

    Attributes:
        tokens: up to the user's words.
        failure: why there are none.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    failure: str | None = None

    def length_in(self, prompt: array[int] | list[int]) -> int:
        """How many of a prompt's first tokens are the part's first ones."""
        return common_tokens(self.tokens, array("i", prompt[: len(self.tokens)]))


@dataclass(frozen=True)
class SystemTokens:
    """The system part of one chat of a request, with its tokens as far as they are known."""

    prefixes: SystemPrefixes
    part: SystemPart
    prefix: SystemPrefix

    async def found_anew(self) -> SystemPrefix:
        """The prefix as it is now, measured again unless another request has done so."""
        return await self.prefixes.find(self.part, outdated=self.prefix)


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

    async def of_request(
        self,
        path: str,
        request: Mapping[str, Any],
        budget: RequestBudget,
        limit: int | None,
        *,
        named: bool,
    ) -> list[SystemTokens]:
        """The parts of a request whose budget protects one by roles; empty if nothing depends on them.

        Args:
            limit: most tokens that may be protected.
            named: whether the request says so, rather than the server's default.

        Raises:
            RefusalError: it says so, and has no such part, or one that cannot be protected.
        """
        word = str(budget.protect)
        parts = system_parts(path, request, task=word == "task")
        if named and parts is None:
            message = (
                f"{FIELD}: '{word}' is not supported by {path}, whose prompts have no system messages; "
                "'prompt', 'short' and a number are"
            )
            raise RefusalError(message, FIELD, "unsupported")
        if named and (not parts or any(part.is_empty for part in parts)):
            raise RefusalError(f"{FIELD}: '{word}' needs {NEEDS[word]}", FIELD, "value")
        if not budget.evicts or parts is None:
            return []
        found = []
        for part in parts:
            prefix = (
                SystemPrefix(failure="there is none") if part.is_empty else await self.find(part)
            )
            if named:
                _check(prefix, limit, word)
            found.append(SystemTokens(self, part, prefix))
        return found

    async def find(self, part: SystemPart, outdated: SystemPrefix | None = None) -> SystemPrefix:
        """The prefix of ``part``, measured once however many ask at the same time. Never raises.

        Args:
            outdated: a prefix that is not to be returned, if it is still the one that is remembered.
        """
        try:
            key = _key(part)
        except (RecursionError, ValueError) as error:
            return SystemPrefix(failure=str(error))
        known = self._known.get(key)
        if known is not None and known is not outdated:
            self._known.move_to_end(key)
            return known
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(self._measure_and_keep(key, part))
        # The client that came first may leave; others wait for the same.
        return await asyncio.shield(task)

    async def _measure_and_keep(self, key: bytes, part: SystemPart) -> SystemPrefix:
        try:
            one, two = [await self._render(part.kind, part.body(user)) for user in USERS]
        except Exception as error:  # noqa: BLE001 - templates raise what they like
            return SystemPrefix(failure=str(error) or type(error).__name__)
        finally:
            del self._running[key]
        length = common_tokens(one, two)
        found = SystemPrefix(one[:length], None if length else NOT_FIRST)
        self._tokens += length - len(self._known.pop(key, SystemPrefix()).tokens)
        self._known[key] = found
        while self._tokens > MAX_TOKENS or len(self._known) > MAX_PARTS:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.tokens)
        return found


def _check(prefix: SystemPrefix, limit: int | None, word: str) -> None:
    if prefix.failure is not None:
        accepted = (
            f"a number, 'prompt' or 'short' here: what it protects is not found: {prefix.failure}"
        )
    elif limit is not None and len(prefix.tokens) > limit:
        accepted = f"at most {limit} tokens here (what it protects has {len(prefix.tokens)})"
    else:
        return
    raise RefusalError(f"{FIELD} must be {accepted}, got '{word}'", FIELD, "value")


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
    """Equal for parts that are rendered alike."""
    text = json.dumps([part.kind, part.body(USERS[0])], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
