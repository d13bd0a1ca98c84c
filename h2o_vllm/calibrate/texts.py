# SPDX-License-Identifier: Apache-2.0
"""Default texts for a calibration, which come with Python: prose, code, and made-up records."""

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
"""Default number of pieces per text."""

INSTRUCTION = "\n\nRepeat the previous context exactly."
"""The instruction of KVzip (arXiv 2505.23416)."""

SEPARATOR = "<separator>"

TOPICS = ("formatstrings", "string-methods", "debugger", "typesseq")
MODULES = (difflib, optparse, textwrap)
RECORDS = 400
"""Number of lines; a piece holds some dozens."""


def _module(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


def _records() -> str:
    """Made-up names, dates, amounts and numbers. None can be guessed from the text before it."""
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
"""Prose and code of Python itself. ``loadtest/quality`` measures with none of them."""

SOURCES = (*PYTHONS, _records)
"""The default texts."""


SOURCE = "Python's documentation and library (PSF-2.0), made-up records"
"""A description of :data:`SOURCES`."""


def instruction(tokenizer: Any) -> list[int]:
    """Token ids between a text and its repetition: :data:`INSTRUCTION`, then the opening of an answer.

    The opening comes from the chat template. It is a line break if there is no template, or if the template
    does more than put text around a user message.
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
    """The texts of these files.

    Raises:
        ConfigError: a file cannot be read.
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
    """Pieces of ``length`` token ids, at most ``most`` of each text."""
    for text in texts:
        tokens = encode(text)
        for at in range(0, min(len(tokens), most * length) - length + 1, length):
            yield tokens[at : at + length]
