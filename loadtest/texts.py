# SPDX-License-Identifier: Apache-2.0
"""Prompts of the load test: real English, no two with the same beginning. Imports nothing of ours.

By default stretches of Python's own documentation, which every Python carries; or one text per line of a
JSONL file. Request ``i`` has the same prompt in every run with the same settings.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

__all__ = ["CHARS_PER_TOKEN", "Prompts", "documentation", "read_jsonl"]

CHARS_PER_TOKEN = 4.2
"""Where the server cannot be asked: English with the vocabulary of a current model."""

PLACE, LENGTH = 0.7548776662466927, 0.5698402909980532
"""Multiples of them, modulo 1, fall evenly everywhere however many are taken, and independently of each
other (the R2 sequence)."""


class Prompts:
    """Deals prompts to requests by number.

    Args:
        documents: one text is cut into stretches; of several, request ``i`` gets one, in turn.
        chars: wanted length; 0 takes documents whole.
        jitter: lengths vary evenly by this share up and down.
        salt: shifts where stretches begin, so that two runs need not share a prompt.
        lane: the same for processes of one run.
    """

    def __init__(
        self, documents: list[str], chars: int, jitter: float = 0.0, salt: int = 0, lane: int = 0
    ) -> None:
        self._documents = documents
        self._chars = chars
        self._jitter = jitter
        self._shift = 7_919 * salt + 10_000_019 * lane

    def __getitem__(self, number: int) -> str:
        """The prompt of request ``number``."""
        number += self._shift
        text = self._documents[number % len(self._documents)]
        if not self._chars:
            return text
        spread = 2 * ((number * LENGTH) % 1.0) - 1
        chars = round(self._chars * (1 + self._jitter * spread))
        if len(self._documents) > 1:
            return text[:chars]
        start = int((number * PLACE) % 1.0 * max(0, len(text) - chars))
        # From the beginning of a word.
        start = max(0, text.rfind(" ", 0, start + 1)) if start else 0
        return text[start : start + chars].strip()


def documentation() -> str:
    """About 0.5 MB of English: the language reference that pydoc shows."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def read_jsonl(path: Path, key: str) -> list[str]:
    """The texts under ``key`` of every line.

    Raises:
        ValueError: a line lacks the key, or there is none.
    """
    texts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        if key not in row:
            raise ValueError(f"{path}:{number}: no {key!r}; it has {sorted(row)}")
        texts.append(str(row[key]))
    if not texts:
        raise ValueError(f"{path}: no lines")
    return texts
