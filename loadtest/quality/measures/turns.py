# SPDX-License-Identifier: Apache-2.0
"""Is a fact of a chat's first message known many turns later?

The first message says codes of places, later ones are about real texts, and the last asks for one code. The
chat is computed as one prompt. With settled segments that is the state that its turns would have come to one
by one (law 5), and a request without them computes the whole chat anew in each turn.
"""

from typing import ClassVar

from typing_extensions import override

from loadtest.common.texts import CHARS_PER_TOKEN
from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.measures.retrieval import codes_of_places, first_number
from loadtest.quality.passages import passages
from loadtest.quality.sizes import Sizes

TURNS = {6: 300, 40: 150}
"""Turns of a chat, and about how many tokens each of them has beside the template's."""
ANSWER_TOKENS = 16
LONGEST_CHAT = round(1.2 * max(turns * tokens for turns, tokens in TURNS.items())) + 300
"""Tokens; a text may have more of them than its characters suggest."""
REPLY = "I have read it. It is a part of a longer text, and I will keep it in mind for what you ask later."


class Turns(Measure):
    """Facts of a chat's first message."""

    name = "turns"
    metrics: ClassVar = tuple(
        Metric(
            f"turn-{turns}",
            f"fact of a chat's first message found in turn {turns}, %",
            "mean",
            "high",
            100,
            0,
        )
        for turns in TURNS
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        lengths = list(TURNS)
        return [
            _chat(model, number // len(TURNS), lengths[number % len(TURNS)])
            for number in range(sizes.turns)
        ]

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        found = float(first_number(answer.text) == sample.secret)
        return {f"turn-{sample.description['turns']}": found}


def _chat(model: Model, number: int, turns: int) -> Sample:
    facts, wanted, code = codes_of_places(number)
    size = int((TURNS[turns] - model.count(REPLY)) * CHARS_PER_TOKEN)
    texts = [text for _, text in passages() if len(text) >= (turns - 2) * size]
    text = texts[number % len(texts)]
    said = [f"{facts} Keep them in mind.", "I will."]
    for turn in range(turns - 2):
        said += [f"Read this: {text[turn * size : (turn + 1) * size]}", REPLY]
    said.append(f"What is the code of the {wanted}? Answer with the number alone.")
    request = GenerationRequest(model.chat(*said), ANSWER_TOKENS)
    return Sample(f"turns-{turns}-{number}", request, code, {"turns": turns})
