# SPDX-License-Identifier: Apache-2.0
"""Long answers: what is asked, and how problems, facts and instructions are judged."""

import re

import pytest

from loadtest.quality.generation import GenerationOutput
from loadtest.quality.measures import MEASURES, Sample
from loadtest.quality.measures.reasoning import results
from loadtest.quality.sizes import Sizes
from tests.loadtest.quality.quality_words import Words

SIZES = Sizes(reasoning=24, answer_tokens=800)


class Listener(Words):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def chat(self, *texts: str) -> tuple[int, ...]:
        self.told += texts
        return super().chat(*texts)


def asked(kind: str) -> tuple[Sample, str]:
    """The first sample of a kind, and its prompt."""
    model = Listener()
    samples = MEASURES["reasoning"].samples(model, SIZES)
    return next(
        (sample, text)
        for sample, text in zip(samples, model.told, strict=True)
        if sample.description["kind"] == kind
    )


def judged(sample: Sample, text: str, tokens: int = 700) -> dict[str, float]:
    return MEASURES["reasoning"].values(sample, GenerationOutput(text, 1.0, tokens=tokens))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Problem 2: so 3 + 15\n#### 18", 18),
        ("**Problem 1:**\n#### 4\n\n### Problem 2\n#### 1,800.50\nin 3 steps", 1800.5),
        ("Problem 2:\nthe result is \\( -7 \\)", -7),
        ("Problem 2: 4\n\nI was wrong.\nProblem 2: 5\n", 5),
        ("Problem 1: as in problem 2\n#### 4", None),
        ("Problem 2: none", None),
        ("#### 18", None),
    ],
)
def test_a_result_is_read_below_its_heading(text: str, number: float | None) -> None:
    assert results(text).get(2) == number


def test_problems_are_right_by_their_own_numbers() -> None:
    sample, text = asked("problems")
    first, second = sample.secret
    assert first != second, "else the swap shows nothing"
    assert text.count("Problem ") == 2
    right = f"Problem 1: 2\n#### {first:g}\nProblem 2: 3\n#### {second:g}"
    assert judged(sample, right) == {"right": 1.0, "length": 700.0, "ended": 1.0}
    assert judged(sample, f"Problem 2\n#### {second:g}")["right"] == 0.5
    swapped = f"Problem 2: 3\n#### {first:g}\nProblem 1: 2\n#### {second:g}"
    assert judged(sample, swapped)["right"] == 0.0
    assert judged(sample, right, tokens=800)["ended"] == 0.0


def test_a_fact_is_asked_behind_a_long_text() -> None:
    sample, text = asked("fact")
    codes = dict(re.findall(r"The code of the (\w+) is (\d{4})\.", text))
    assert len(codes) == len(set(codes.values())) == 8
    asks = [Words().encode(f"The code of the {place} is") for place in codes]
    place = list(codes)[asks.index(list(sample.request.forced[-6:]))]
    assert len(sample.request.forced) == 806 == sample.request.max_tokens - 8
    assert judged(sample, f" {codes.pop(place)}.") == {"fact": 1.0}
    assert judged(sample, f" {codes.popitem()[1]}.") == {"fact": 0.0}
