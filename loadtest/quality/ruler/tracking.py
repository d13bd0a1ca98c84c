# SPDX-License-Identifier: Apache-2.0
"""Variable tracking: which variables have a value, through a chain of assignments hidden in noise.

After ``variable_tracking.py`` of NVIDIA/RULER: one chain of four hops, and one worked example before it.
"""

import itertools
import random
import string
from dataclasses import replace

from loadtest.quality.ruler.example import Count, Example
from loadtest.quality.ruler.needles import NOISE

HOPS = 4
ANSWER_TOKENS = 30
SHOWN_TOKENS = 500
"""Of the worked example."""


class Tracking:
    """The task ``vt``."""

    least = HOPS + 1

    def __init__(self, count: Count) -> None:
        size = self.least
        while count(_example(random.Random(0), size + 1, 3).text) <= SHOWN_TOKENS:
            size += 1
        self._shown = size

    def build(self, source: random.Random, size: int) -> Example:
        """An example with so many lines of noise."""
        shown = _example(source, self._shown, 3)
        asked = _example(source, size, 5)
        before = f"{shown.text} {' '.join(shown.answers)}\n\n"
        return replace(asked, context=before + asked.context)


def _example(source: random.Random, size: int, letters: int) -> Example:
    """One chain in so many lines; names have so many letters."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(source.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(source.randrange(10000, 99999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    lines = [NOISE] * size
    for number, place in enumerate(sorted(source.sample(range(size), len(chain)))):
        lines.insert(place + number, chain[number])
    text = "\n".join(lines).replace(". \n", ".\n")
    return Example(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{text}\n",
        f"Question: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: ",
        tuple(names),
        ANSWER_TOKENS,
    )
