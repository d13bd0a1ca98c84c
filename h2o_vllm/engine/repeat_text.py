# SPDX-License-Identifier: Apache-2.0
"""What stands between a prompt and its repetition, in the model's tokens. Engine core.

The engine core has no tokenizer until somebody asks for a policy that repeats: it is loaded then, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import cached_tokenizer_from_config

from h2o_vllm.blocks.repetition import INSTRUCTION_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ModelConfig

__all__ = ["RepeatText", "repeat_text"]

INSTRUCTION = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
"""KVzip's (arXiv 2505.23416): of the first piece, and of each further one, whose beginning follows."""

BEGINNING = 8
"""Tokens that a further piece is named by: the ones before it."""

SEPARATOR = "<separator>"


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


def repeat_text(model: ModelConfig) -> RepeatText | str:
    """The text for a model, or why there is none, in words for who wants it. Loads the tokenizer."""
    try:
        tokenizer: Any = cached_tokenizer_from_config(model)
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
