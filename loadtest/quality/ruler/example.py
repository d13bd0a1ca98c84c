# SPDX-License-Identifier: Apache-2.0
"""What a task makes, and how long."""

import random
from collections.abc import Callable
from dataclasses import dataclass

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class Example:
    """One question about one text.

    Attributes:
        context: all before the question. question: what a user asks.
        prefix: how the answer begins; the model goes on from it.
        answers: what the answer has to contain.
        max_tokens: of the answer at most.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    max_tokens: int

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.context + self.question + self.prefix


Build = Callable[[random.Random, int], Example]
"""An example with so much haystack."""


def largest(build: Build, seed: str, length: int, count: Count, least: int) -> Example:
    """The example with the most haystack whose prompt and answer take at most ``length`` tokens.

    Every size is built from the same seed.

    Raises:
        ValueError: not even ``least`` of it fits.
    """

    def fits(size: int) -> Example | None:
        example = build(random.Random(seed), size)
        return example if count(example.text) + example.max_tokens <= length else None

    found = fits(least)
    if found is None:
        raise ValueError(f"length: {length} tokens are too few for the smallest example")
    low, high = least, 2 * least
    while larger := fits(high):
        found, low, high = larger, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if larger := fits(middle):
            found, low = larger, middle
        else:
            high = middle
    return found
