# SPDX-License-Identifier: Apache-2.0
"""Texts to learn from that every Python carries: prose, code, and records as prompts have them."""

from __future__ import annotations

import difflib
import json
import optparse
import pydoc_data.topics
import random
import textwrap
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from h2o_vllm.errors import ConfigError

PIECES = 2
"""Of a text, by default."""

INSTRUCTION = "\n\nRepeat the previous context exactly."
"""KVzip's (arXiv 2505.23416)."""

SEPARATOR = "<separator>"

TOPICS = ("formatstrings", "string-methods", "debugger", "typesseq")
MODULES = (difflib, optparse, textwrap)
RECORDS = 400
"""Lines, of which a piece holds some dozens."""


def _module(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


def _records() -> str:
    """Made up: names, times, amounts, numbers. None can be guessed from what stands before it."""
    draw = random.Random(0)  # noqa: S311 - nothing secret
    names = ("Ada", "Blaise", "Carl", "Emmy", "Grace", "Kurt", "Leonhard", "Sofia")
    lines = []
    for _ in range(RECORDS):
        number = uuid.UUID(int=draw.getrandbits(128))
        record = {
            "id": str(number),
            "name": draw.choice(names),
            "day": f"20{draw.randint(10, 26)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
            "amount": round(draw.uniform(1, 9999), 2),
        }
        said = (
            f"{record['name']} paid {record['amount']} on {record['day']}; the receipt is {number}."
        )
        lines.append(json.dumps(record) if draw.random() < 0.5 else said)
    return "\n".join(lines)


PYTHONS: tuple[Callable[[], str], ...] = (
    *(partial(pydoc_data.topics.topics.__getitem__, name) for name in TOPICS),
    *(partial(_module, module) for module in MODULES),
)
"""Prose and code of Python's own. Nothing here is measured on: see ``loadtest/quality``."""

SOURCES = (*PYTHONS, _records)
"""What is learned from, unless the user names other texts."""


SOURCE = "Python's documentation and library (PSF-2.0), made-up records"
"""What :data:`SOURCES` are."""


def instruction(tokenizer: Any) -> list[int]:
    """Token ids between a text and its repetition: :data:`INSTRUCTION`, then the opening of an answer.

    The chat template's; a line break where there is no template, or where it does more with a user's message
    than put something around it.
    """
    opening = "\n"
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": SEPARATOR}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        _, found, after = text.partition(SEPARATOR)
        opening = after if found and SEPARATOR not in after else opening
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return [*encode(INSTRUCTION), *encode(opening)]


def read_texts(paths: Iterable[Path]) -> list[str]:
    """The user's own.

    Raises:
        ConfigError: one cannot be read.
    """
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--texts {path}: {error}; wanted a file of text") from None
    return texts


def pieces(
    texts: Iterable[str], encode: Callable[[str], list[int]], length: int, most: int
) -> Iterator[list[int]]:
    """Token ids, ``length`` each, up to ``most`` of a text."""
    for text in texts:
        tokens = encode(text)
        for at in range(0, min(len(tokens), most * length) - length + 1, length):
            yield tokens[at : at + length]
