# SPDX-License-Identifier: Apache-2.0
"""Common and frequent words: what a text has most of, which no single place says.

After ``common_words_extraction.py`` and ``freq_words_extraction.py`` of NVIDIA/RULER.
"""

import math
import random
import string
from dataclasses import dataclass, replace

from loadtest.quality.ruler.example import Example
from loadtest.quality.ruler.source import words

COMMON = 10
SHORT = 4096
"""Prompts shorter than this have lower counts in ``cwe``."""

ZETA_2 = math.pi**2 / 6
LETTERS = 6


@dataclass(frozen=True)
class CommonWords:
    """The task ``cwe``: the ten most common words of a numbered list, with one worked example before it.

    Attributes:
        length: tokens of the prompt, which decide how often words come.
    """

    length: int
    least = 2 * COMMON

    def build(self, source: random.Random, size: int) -> Example:
        """An example of so many different words.

        Raises:
            ValueError: there are not so many.
        """
        if size > len(words()):
            raise ValueError(
                f"length: {self.length} tokens take more than our {len(words())} words"
            )
        short = self.length < SHORT
        shown = self._ask(source, 20, 3, 1) if short else self._ask(source, 40, 10, 3)
        asked = self._ask(source, size, *((6, 1) if short else (30, 3)))
        before = f"{shown.text} {_numbered(shown.answers)}\n"
        return replace(asked, context=before + asked.context)

    def _ask(self, source: random.Random, size: int, often: int, rarely: int) -> Example:
        chosen = source.sample(words(), size)
        listed = chosen[:COMMON] * often + chosen[COMMON:] * rarely
        source.shuffle(listed)
        return Example(
            "Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n{_numbered(listed)}\n",
            "Question: What are the 10 most common words in the above list?",
            " Answer: The top 10 words that appear most often in the list are:",
            tuple(chosen[:COMMON]),
            120,
        )


@dataclass(frozen=True)
class FrequentWords:
    """The task ``fwe``: the three most frequent of coded words whose counts fall as those of a language.

    Attributes:
        length: tokens of the prompt, which decide how many different words there are.
    """

    length: int
    least = 100

    def build(self, source: random.Random, size: int) -> Example:
        """An example of about so many words."""
        tokens = 50
        kinds = max(4, (self.length - tokens) // 50)
        vocabulary: list[str] = []
        while len(vocabulary) < kinds:
            word = "".join(source.choices(string.ascii_lowercase, k=LETTERS))
            if word not in vocabulary:
                vocabulary.append(word)
        # The most frequent one is noise.
        vocabulary[0] = "..."
        coded = [
            word
            for rank, word in enumerate(vocabulary, 1)
            for _ in range(int(size * rank**-2.0 / ZETA_2))
        ]
        source.shuffle(coded)
        return Example(
            "Read the following coded text and track the frequency of each coded word. Find the three most "
            f"frequently appeared coded words. {' '.join(coded)}\n",
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
            "most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
            tuple(vocabulary[1:4]),
            tokens,
        )


def _numbered(listed: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
