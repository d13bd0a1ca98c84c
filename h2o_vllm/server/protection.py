# SPDX-License-Identifier: Apache-2.0
"""``kv_protect`` in words becomes a number of tokens before the engine sees it. API-server process.

The engine counts tokens and knows no roles. When a request arrives, its system parts are found; when vLLM
hands its prompts to the engine client, each prompt is compared with them, and the number of its first tokens
that are the part takes the word's place. No prompt is trusted to begin with what another one began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve
from h2o_vllm.errors import BudgetError
from h2o_vllm.server.before_generate import look_before, token_ids
from h2o_vllm.server.protocol import RefusalError
from h2o_vllm.server.system_part import SystemPart, system_parts
from h2o_vllm.server.system_prefix import SystemPrefix, SystemPrefixes

__all__ = ["Guard", "Protection", "asked_protection", "install", "protecting"]

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

FIELD, SYSTEM, PROMPT = "kv_protect", "system", "prompt"
NEEDS_TEXT = f"{FIELD}: '{SYSTEM}' needs a system message or tools at the beginning of the chat"


def _nobody(reason: str) -> None:
    del reason


@dataclass
class Protection:
    """What one HTTP request protects.

    Attributes:
        word: ``"system"`` or ``"prompt"``; ``None``: nothing is to be replaced.
        named: whether the request says so, rather than the server's default.
        limit: most tokens that may be protected.
        parts: the system part of each chat.
        prefixes: the tokens of each part, once they are found.
        count_refusal: counts a refusal, by reason.
        calls: of the engine so far: one for each chat, in their order.
    """

    word: str | None = None
    named: bool = False
    limit: int | None = None
    parts: list[SystemPart] = field(default_factory=list)
    prefixes: list[SystemPrefix] = field(default_factory=list)
    count_refusal: Callable[[str], None] = _nobody
    calls: int = 0

    async def find(self, prefixes: SystemPrefixes) -> None:
        """Fill in :attr:`prefixes`; only a part that is not empty has any."""
        for part in self.parts:
            empty = SystemPrefix(failure="there is none") if part.is_empty else None
            self.prefixes.append(empty or await prefixes.find(part))

    def tokens_of(self, prompt: list[int] | None) -> int:
        """The number that replaces the word for the next prompt.

        Raises:
            VLLMValidationError: the request asks for what cannot be, or may not be, protected.
        """
        call, self.calls = self.calls, self.calls + 1
        if self.word == SYSTEM and not self.prefixes:
            return 0
        if prompt is None:
            return self._refused("a number for a prompt that is no tokens", 0)
        if self.word == PROMPT:
            return self._limited(len(prompt), "the prompt has")
        # An agent's later calls go on from the same beginning.
        prefix = self.prefixes[min(call, len(self.prefixes) - 1)]
        length = prefix.length_in(prompt)
        if length is None:
            reason = prefix.failure or "the prompt of this chat does not begin with them"
            return self._refused(
                f"a number or '{PROMPT}' here, for system messages and tools cannot be told: {reason}",
                0,
            )
        return self._limited(length, "system messages and tools have")

    def _limited(self, length: int, what: str) -> int:
        if self.limit is None or length <= self.limit:
            return length
        return self._refused(f"at most {self.limit} tokens here ({what} {length})", self.limit)

    def _refused(self, accepted: str, otherwise: int) -> int:
        """Refuse a request that names the field; else protect ``otherwise``."""
        error = BudgetError(FIELD, self.word, accepted)
        if not self.named:
            logger.warning_once("--kv-protect %s: %d tokens of some requests: %s",
                                self.word, otherwise, error)  # fmt: skip
            return otherwise
        self.count_refusal("value")
        raise VLLMValidationError(str(error), parameter=FIELD)


def asked_protection(
    path: str, request: Mapping[str, Any], asked: Mapping[str, Any], config: H2OConfig
) -> Protection:
    """What a request protects, its prefixes not yet found.

    Args:
        request: its body. asked: its budget fields, which have been checked.

    Raises:
        RefusalError: it asks for a system part that it does not have.
    """
    budget = resolve(config, asked)
    named = asked.get(FIELD) is not None
    if budget.protect == PROMPT and named and config.protect_limit is not None:
        # Else the engine counts: it needs no help with this word.
        return Protection(PROMPT, named, config.protect_limit)
    if budget.protect != SYSTEM:
        return Protection()
    parts = system_parts(path, request)
    if named and parts is None:
        raise RefusalError(
            f"{FIELD}: '{SYSTEM}' is not supported by {path}, whose prompts have no system messages; "
            f"'{PROMPT}' and a number are",
            FIELD,
            "unsupported",
        )
    if named and (not parts or any(part.is_empty for part in parts)):
        raise RefusalError(NEEDS_TEXT, FIELD, "value")
    # Where nothing is ever evicted nobody has to know.
    wanted = parts if parts and budget.evicts else []
    if all(part.is_empty for part in wanted):
        wanted = []
    return Protection(SYSTEM, named, config.protect_limit, wanted)


class Guard:
    """Of one HTTP request: what it protects, once its body is known.

    Attributes:
        protection: as the request asks; at first nothing.
    """

    def __init__(self) -> None:
        self.protection = Protection()


_guard: ContextVar[Guard | None] = ContextVar("h2o_vllm_guard", default=None)


@contextmanager
def protecting() -> Iterator[Guard]:
    """Within this block, and in tasks started in it, prompts are protected as the yielded object says."""
    guard = Guard()
    token = _guard.set(guard)
    try:
        yield guard
    finally:
        _guard.reset(token)


def install(engine_client: Any, model_config: Any) -> None:
    """Wrap ``engine_client.generate``, on this object only. Twice is the same as once."""

    def protect(prompt: Any, params: Any) -> None:
        guard = _guard.get()
        if guard is not None and guard.protection.word is not None:
            tokens = guard.protection.tokens_of(token_ids(model_config, prompt))
            params.extra_args = {**(params.extra_args or {}), FIELD: tokens}

    look_before(engine_client, "_h2o_protecting", protect)
