# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack: magic numbers of words, hidden in noise, in prose or among other needles.

After ``niah.py`` and ``synthetic.yaml`` of NVIDIA/RULER.
"""

import random
import re
import uuid
from dataclasses import dataclass
from typing import Literal

from loadtest.quality.ruler.example import Example
from loadtest.quality.ruler.source import ADJECTIVES, NOUNS, prose

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SENTENCE = re.compile(r"(?<=[.!?]) ")
DEPTHS = [round(100 * place / 39) for place in range(40)]
"""Percent of the sentences before a needle in prose."""

ANSWER_TOKENS = 128

Kind = Literal["numbers", "words", "uuids"]


@dataclass(frozen=True)
class Needles:
    """One of the eight tasks.

    Attributes:
        haystack: what they are hidden in.
        keys, values: what they look like.
        num_keys: needles' keys; each has ``num_values`` values; ``num_queries`` keys are asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    keys: Kind = "words"
    values: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def least(self) -> int:
        """Smallest haystack: words of prose, lines else."""
        return 100 if self.haystack == "essay" else 5

    def build(self, source: random.Random, size: int) -> Example:
        """An example with so many lines, or words of prose, as haystack."""
        taken: set[str] = set()
        keys = [_fresh(source, self.keys, taken) for _ in range(self.num_keys)]
        values = {
            key: [_value(source, self.values) for _ in range(self.num_values)] for key in keys
        }
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        source.shuffle(needles)
        if self.haystack == "essay":
            text = _in_prose(source, needles, size)
        else:
            text = self._in_lines(source, needles, size, taken)
        asked = source.sample(keys, self.num_queries)
        return self._ask(text, asked, [value for key in asked for value in values[key]])

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.values} for {key} is: {value}."

    def _in_lines(
        self, source: random.Random, needles: list[str], size: int, taken: set[str]
    ) -> str:
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [
                self._needle(_fresh(source, self.keys, taken), _value(source, self.values))
                for _ in range(size)
            ]
        places = sorted(source.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _ask(self, text: str, asked: list[str], answers: list[str]) -> Example:
        one = len(answers) == 1
        kind = self.values[:-1] if one else self.values
        some, verb, what = ("A", "is", "is") if one else ("Some", "are", "are all")
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        return Example(
            f"{some} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n{text}\n",
            f"What {what} the special magic {kind} for {query} mentioned in the provided text?",
            f" The special magic {kind} for {query} mentioned in the provided text {verb}",
            tuple(answers),
            ANSWER_TOKENS,
        )


def _in_prose(source: random.Random, needles: list[str], size: int) -> str:
    """Needles between the sentences of ``size`` words, which begin anywhere."""
    book = prose()
    start = source.randrange(len(book))
    around = (book[start:] + book) if size > len(book) - start else book[start:]
    sentences = SENTENCE.split(" ".join(around[:size]))
    places = sorted(len(sentences) * depth // 100 for depth in source.sample(DEPTHS, len(needles)))
    for number, (place, needle) in enumerate(zip(places, needles, strict=True)):
        sentences.insert(place + number, needle)
    return " ".join(sentences)


def _fresh(source: random.Random, kind: Kind, taken: set[str]) -> str:
    """One that is not taken yet."""
    value = _value(source, kind)
    while value in taken:
        value = _value(source, kind)
    taken.add(value)
    return value


def _value(source: random.Random, kind: Kind) -> str:
    if kind == "numbers":
        return str(source.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=source.getrandbits(128), version=4))
    return f"{source.choice(ADJECTIVES)}-{source.choice(NOUNS)}"
