# SPDX-License-Identifier: Apache-2.0
"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["QUICK", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """How many samples each generation has, and how long they are.

    Attributes:
        forced, xsum, retrieval, long, ruler: samples. Multiples of 36 have all kinds of retrieval evenly,
            those of 13 all of RULER's tasks.
        prompt_tokens, forced_tokens: of a text how much is prompt, and how much is then forced.
        lengths: of the texts in which something is hidden, in tokens.
        long_tokens: of long answers at most.
        ruler_tokens: of RULER's prompts, answers included.
        xsum_file: the H2O authors' requests.
    """

    forced: int = 8
    xsum: int = 40
    retrieval: int = 36
    long: int = 16
    ruler: int = 26
    prompt_tokens: int = 1024
    forced_tokens: int = 512
    lengths: tuple[int, ...] = (500, 1000)
    long_tokens: int = 512
    ruler_tokens: int = 2048
    xsum_file: Path | None = None


QUICK = Sizes(
    forced=2, xsum=4, retrieval=6, long=2, ruler=13, prompt_tokens=256, forced_tokens=48, lengths=(300,),
    long_tokens=64, ruler_tokens=1024,
)  # fmt: skip
"""Does it run? Says nothing of quality."""
