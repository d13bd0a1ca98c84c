# SPDX-License-Identifier: Apache-2.0
"""Texts to tokens: a chat template's parts, and how a model is asked to repeat."""

from __future__ import annotations

from functools import partial

from h2o_vllm.calibrate.texts import PYTHONS, pieces
from loadtest.quality.ladder.model import LadderModel

__all__ = ["around", "encode", "repetition", "unseen_texts"]

INSTRUCTION = "\n\nRepeat the previous context exactly."
"""KVzip's (arXiv 2505.23416)."""

SEPARATOR = "<separator>"


def unseen_texts(model: LadderModel, length: int, most: int = 3) -> list[list[int]]:
    """Token ids of texts that nothing is measured on, of ``length`` each, up to so many of a source."""
    return list(pieces((read() for read in PYTHONS), partial(encode, model), length, most))


def encode(model: LadderModel, text: str) -> list[int]:
    """Token ids, without special ones; of texts longer than any context, too."""
    tokens: list[int] = model.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return tokens


def around(model: LadderModel) -> tuple[list[int], list[int]]:
    """What the chat template has before and after a message."""
    text = SEPARATOR + "\n"
    if model.tokenizer.chat_template:
        message = [{"role": "user", "content": SEPARATOR}]
        text = model.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False
        )
    before, after = text.split(SEPARATOR)
    return encode(model, before), encode(model, after)


def repetition(model: LadderModel, context: list[int]) -> list[int]:
    """What is read behind a prompt so that the model repeats ``context``."""
    return [*encode(model, INSTRUCTION), *around(model)[1], *context]
