# SPDX-License-Identifier: Apache-2.0
"""Is a fact found again? Hidden in real text at several depths and lengths, asked for by exact match.

Three ways to ask for the same fact in the same text:

* ``before``: the question stands before the text, and again after it;
* ``end``: only after the text, as the end of the prompt. Eviction has not begun: it still sees the question;
* ``later``: after the prompt, as text that the model itself goes on with (forced). What went, went without
  knowing the question. Full KV reads the same tokens in ``end`` and ``later``.
"""

import random
import re
from typing import ClassVar

from typing_extensions import override

from loadtest.common.texts import Prompts, documentation
from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample, asked_later
from loadtest.quality.sizes import Sizes

WAYS = {
    "before": "before the text as well",
    "end": "at the end of the prompt",
    "later": "after eviction began",
}
KINDS = ("needle", "pairs")
DEPTHS = (0.1, 0.5, 0.9)
PLACES = ("library", "harbour", "museum", "station", "school", "hospital", "theatre", "market")
PAIRS = 2
"""Facts of a kind, of which one is asked for."""

ANSWER_TOKENS = 10


def hidden(text: str, facts: list[str], depth: float) -> str:
    """``text`` with ``facts`` as lines of their own before a paragraph at ``depth`` (0..1)."""
    lines = text.splitlines()
    lines.insert(round(depth * len(lines)), "\n" + "\n".join(facts) + "\n")
    return "\n".join(lines)


def codes_of_places(number: int) -> tuple[str, str, str]:
    """Codes of all places, as text; one of the places; its code."""
    source = random.Random(number)
    codes = {place: str(source.randrange(1000, 10000)) for place in PLACES}
    wanted = source.choice(PLACES)
    facts = " ".join(f"The code of the {place} is {code}." for place, code in codes.items())
    return facts, wanted, codes[wanted]


def first_number(text: str) -> str | None:
    """The first number of several digits."""
    match = re.search(r"\d{2,}", text)
    return match.group() if match else None


class Retrieval(Measure):
    """Whether hidden facts are found."""

    name = "retrieval"
    metrics: ClassVar = (
        *(
            Metric(way, f"fact found, question {where}, %", "mean", "high", 100, 0)
            for way, where in WAYS.items()
        ),
        Metric("needle", "one fact in the text found (all ways), %", "mean", "high", 100, 0),
        Metric("pairs", f"one of {PAIRS} facts found (all ways), %", "mean", "high", 100, 0),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        ways = [way for way in WAYS if model.forces or way != "later"]
        texts = {
            length: Prompts([documentation()], length, model.count) for length in sizes.lengths
        }
        samples = []
        for number in range(sizes.retrieval):
            # Any number of samples has ways evenly, then kinds, then lengths, then depths.
            case, turn = divmod(number, len(WAYS))
            way = list(WAYS)[turn]
            if way not in ways:
                continue
            rest, kind = divmod(case, len(KINDS))
            again, place = divmod(rest, len(sizes.lengths))
            length, depth = sizes.lengths[place], DEPTHS[again % len(DEPTHS)]
            # The same text and fact for all ways.
            samples.append(
                _sample(model, way, KINDS[kind], texts[length][case], length, depth, case)
            )
        return samples

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        found = float(first_number(answer.text) == sample.secret)
        return {sample.description["way"]: found, sample.description["kind"]: found}


def _sample(
    model: Model, way: str, kind: str, text: str, length: int, depth: float, case: int
) -> Sample:
    source = random.Random(case)
    places = source.sample(PLACES, PAIRS if kind == "pairs" else 1)
    codes = {place: str(source.randrange(1000, 10000)) for place in places}
    wanted = source.choice(places)
    facts = [f"The secret code of the {place} is {code}." for place, code in codes.items()]
    question = f"What is the secret code of the {wanted}?"
    first = f"Read the text to answer this question: {question}\n\n" if way == "before" else ""
    body = f"{first}{hidden(text, facts, depth)}\n\n"
    asked = f"Question: {question}\nAnswer: The secret code of the {wanted} is"
    if way == "later":
        request = asked_later(model, body, asked, ANSWER_TOKENS)
    else:
        request = GenerationRequest(body + asked, ANSWER_TOKENS)
    description = {"way": way, "kind": kind, "length": length, "depth": depth}
    return Sample(f"{kind}-{length}-{depth}-{case}-{way}", request, codes[wanted], description)
