# SPDX-License-Identifier: Apache-2.0
"""Prompts of the load test: real English, no two with the same beginning. Imports nothing of ours.

By default stretches of Python's own documentation, which every Python carries; or one text per line of a
JSONL file. Request ``i`` has the same prompt in every run with the same settings.
"""

import json
import pydoc_data.topics
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

CHARS_PER_TOKEN = 4.2
"""Where the server cannot be asked: English with the vocabulary of a current model."""

PIECE = 1000
"""Characters that are counted at once."""

PLACE, LENGTH = 0.7548776662466927, 0.5698402909980532
"""Multiples of them, modulo 1, fall evenly everywhere however many are taken, and independently of each
other (the R2 sequence)."""


class Ruler:
    """How many tokens of a text have passed at which character; even inside of ``PIECE`` characters.

    One number of characters per token would not do: a table has twice the tokens of prose.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        self._chars = [0, *accumulate(map(len, pieces))]
        self._tokens = [0, *accumulate(max(1, count(piece)) for piece in pieces)]

    @property
    def tokens(self) -> int:
        """Tokens of the whole text."""
        return self._tokens[-1]

    def tokens_at(self, char: float) -> float:
        """Tokens before a character."""
        return _between(self._chars, self._tokens, char)

    def char_at(self, tokens: float) -> int:
        """The character at which so many tokens have passed."""
        return round(_between(self._tokens, self._chars, tokens))


def _between(known: list[int], wanted: list[int], value: float) -> float:
    """``wanted`` at ``value`` of ``known``, on a line through the points of both."""
    at = min(max(1, bisect_left(known, value)), len(known) - 1)
    low, high = known[at - 1], known[at]
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    return wanted[at - 1] + share * (wanted[at] - wanted[at - 1])


class Prompts:
    """Deals prompts to requests by number.

    Args:
        documents: one text is cut into stretches; of several, request ``i`` gets one, in turn.
        tokens: wanted length; 0 takes documents whole.
        count: tokens of a text, as the server counts them.
        jitter: lengths vary evenly by this share up and down.
        salt: shifts where stretches begin, so that two runs need not share a prompt.
        lane: the same for processes of one run.
    """

    def __init__(
        self,
        documents: list[str],
        tokens: int,
        count: Callable[[str], int],
        jitter: float = 0.0,
        salt: int = 0,
        lane: int = 0,
    ) -> None:
        self._documents = documents
        self._tokens = tokens
        self._jitter = jitter
        self._shift = 7_919 * salt + 10_000_019 * lane
        if tokens:
            # Of several documents their beginning tells how dense all are.
            text = documents[0] if len(documents) == 1 else " ".join(documents)[: 20 * PIECE]
            self._ruler = Ruler(text, count)

    def __getitem__(self, number: int) -> str:
        """The prompt of request ``number``."""
        number += self._shift
        text = self._documents[number % len(self._documents)]
        if not self._tokens:
            return text
        spread = 2 * ((number * LENGTH) % 1.0) - 1
        tokens = self._tokens * (1 + self._jitter * spread)
        if len(self._documents) > 1:
            return text[: self._ruler.char_at(tokens)]
        start = self._ruler.char_at((number * PLACE) % 1.0 * max(0.0, self._ruler.tokens - tokens))
        # From the beginning of a word.
        start = max(0, text.rfind(" ", 0, start + 1)) if start else 0
        end = self._ruler.char_at(self._ruler.tokens_at(start) + tokens)
        return text[start:end].strip()


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
