# SPDX-License-Identifier: Apache-2.0
"""How much is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How many samples each measure has, and how long they are.

    Attributes:
        nll, own, retrieval, ruler, reasoning, code, turns: samples. Multiples of 36 have all kinds of
            retrieval evenly, those of 13 all of RULER's tasks, those of 8 all kinds of long answers, those of
            2 short and long chats.
        prompt_tokens, forced_tokens: of a text how much is prompt, and how much is then forced.
        lengths: of the texts in which something is hidden, in tokens.
        ruler_tokens: of RULER's prompts, answers included.
        answer_tokens: of a long answer at most; how much is asked follows from it.
        text_tokens: of a text before word problems, which has nothing to do with them.
    """

    nll: int = 8
    own: int = 16
    retrieval: int = 36
    ruler: int = 26
    reasoning: int = 24
    code: int = 24
    turns: int = 16
    prompt_tokens: int = 1024
    forced_tokens: int = 512
    lengths: tuple[int, ...] = (500, 1000)
    ruler_tokens: int = 2048
    answer_tokens: int = 1500
    text_tokens: int = 0


QUICK = Sizes(
    nll=2, own=2, retrieval=6, ruler=13, reasoning=8, code=2, turns=2, prompt_tokens=256, forced_tokens=48,
    lengths=(300,), ruler_tokens=1024, answer_tokens=200,
)  # fmt: skip
"""Does it run? Says nothing of quality."""
