# SPDX-License-Identifier: Apache-2.0
"""What stands between a prompt and its repetition, in the model's tokens. Engine core.

The engine core has no tokenizer until somebody asks for a policy that repeats: it is loaded then, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import cached_tokenizer_from_config

from h2o_vllm.blocks.repetition import INSTRUCTION_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ModelConfig

__all__ = ["NoRepeatTextError", "RepeatText"]

INSTRUCTION = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
"""KVzip's (arXiv 2505.23416): of the first piece, and of each further one, whose beginning follows."""

BEGINNING = 8
"""Tokens that a further piece is named by: the ones before it."""

SEPARATOR = "<separator>"


class NoRepeatTextError(Exception):
    """There is no text, for the reason given."""


@dataclass(frozen=True)
class RepeatText:
    """Token ids, without special ones but those of the chat template.

    Attributes:
        first, later: the instructions.
        opening: what the template has between a user's message and the answer; without one, a line break.
        start: the token that prompts begin with, and no repetition; ``None``: there is none.
    """

    first: tuple[int, ...]
    later: tuple[int, ...]
    opening: tuple[int, ...]
    start: int | None = None

    @classmethod
    def of(cls, model: ModelConfig) -> RepeatText:
        """The text for a model.

        Raises:
            NoRepeatTextError: it cannot be had, in words for who asked.
        """
        found = _found(model.tokenizer, model.tokenizer_revision, _Hidden(model))
        if isinstance(found, RepeatText):
            return found
        raise NoRepeatTextError(found)

    @property
    def tokens(self) -> int:
        """Most tokens between a prompt and a piece."""
        return max(len(self.first), len(self.later) + BEGINNING) + len(self.opening)

    def repeated(self, prompt: Sequence[int]) -> range:
        """Which tokens of a prompt are repeated.

        The instruction belongs to the user's message: a template's opening at the end comes behind it.
        """
        end = len(prompt)
        opening = len(self.opening)
        if opening < end and tuple(prompt[end - opening :]) == self.opening:
            end -= opening
        return range(int(end > 1 and prompt[0] == self.start), end)

    def behind(self, prompt: Sequence[int], text: range, piece: range) -> list[int]:
        """What is read behind ``prompt[: text.stop]`` so that the model says ``piece`` of it."""
        asked = self.first
        if piece.start > text.start:
            asked = (*self.later, *prompt[max(text.start, piece.start - BEGINNING) : piece.start])
        return [*asked, *self.opening, *prompt[piece.start : piece.stop]]


class _Hidden:
    """A model configuration that does not count among the arguments by which a result is kept."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@cache
def _found(name: str, revision: str | None, hidden: _Hidden) -> RepeatText | str:
    """The text, or why there is none: kept as well, so that nobody loads in vain for every request."""
    del name, revision
    try:
        tokenizer: Any = cached_tokenizer_from_config(hidden.model)
        if tokenizer is None:
            return "it needs the model's tokenizer, which --skip-tokenizer-init leaves out"
        text = RepeatText(
            _encoded(tokenizer, INSTRUCTION),
            _encoded(tokenizer, LATER),
            _encoded(tokenizer, _opening(tokenizer)),
            getattr(tokenizer, "bos_token_id", None),
        )
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer may raise must not end the engine
        return f"the model's tokenizer cannot be used: {type(error).__name__}: {error}"
    if text.tokens > INSTRUCTION_TOKENS:
        return (
            f"with what the chat template has around it, its instruction has {text.tokens} tokens, more "
            f"than {INSTRUCTION_TOKENS}"
        )
    return text


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _opening(tokenizer: Any) -> str:
    """Behind a user's message; templates that do more with one than put something around it have none."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    message = [{"role": "user", "content": SEPARATOR}]
    text: str = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    _, found, after = text.partition(SEPARATOR)
    return after if found and SEPARATOR not in after else "\n"
