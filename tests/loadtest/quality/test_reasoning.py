# SPDX-License-Identifier: Apache-2.0
"""Long answers: what is asked, and how problems, facts and instructions are judged."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from loadtest.quality.generation import GenerationOutput
from loadtest.quality.measures import MEASURES, Sample
from loadtest.quality.measures.reasoning import FIRST, numbered_lines, results
from loadtest.quality.sizes import Sizes
from tests.loadtest.quality.quality_words import Words

SIZES = Sizes(reasoning=24, answer_tokens=800)
LINES = 800 // 30


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


def numbered(line: Callable[[int], str]) -> str:
    """Lines as a model goes on behind the number that is forced."""
    return "\n".join(f"{k}. {line(k)}" for k in range(1, LINES + 1)).removeprefix(FIRST)


def test_all_kinds_are_asked_evenly_through_the_models_template() -> None:
    model = Listener()
    samples = MEASURES["reasoning"].samples(model, SIZES)
    kinds = [sample.description["kind"] for sample in samples]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "problems": 8, "word": 2, "switch": 2, "language": 2, "forbidden": 2, "fact": 8,
    }  # fmt: skip
    assert len({sample.name for sample in samples}) == len(set(model.told)) == 24
    for sample, text in zip(samples, model.told, strict=True):
        assert sample.request.prompt == Words().chat(text)
        assert len(text.split()) < 800, "an engine has room for the prompt"


def test_problems_may_stand_behind_another_text() -> None:
    model, alone = Listener(), asked("problems")
    sizes = Sizes(reasoning=1, answer_tokens=800, text_tokens=2000)
    sample = MEASURES["reasoning"].samples(model, sizes)[0]
    assert model.told[0].endswith(alone[1]) and len(model.told[0]) > 2000 * 4 + len(alone[1])
    assert sample.secret == alone[0].secret and sample.name != alone[0].name


def test_no_problem_is_asked_twice_and_there_are_a_hundred() -> None:
    model = Listener()
    MEASURES["reasoning"].samples(model, Sizes(reasoning=150, answer_tokens=800))
    problems = [re.findall(r"^Problem \d+: (.+)", text, re.MULTILINE) for text in model.told[::3]]
    assert {len(some) for some in problems} == {2}
    assert len({one for some in problems for one in some}) == 100
    with pytest.raises(ValueError, match="100 found"):
        MEASURES["reasoning"].samples(model, Sizes(reasoning=151, answer_tokens=800))


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


def test_lines_are_read_by_number() -> None:
    text = "Here:\n1. One: two.\n**2)** Dos\n\n 3.\nfree\n2. again\nThe code is 1234.\n"
    assert numbered_lines(text) == {1: "One: two.", 2: "Dos"}


def test_a_fact_is_asked_behind_a_long_text() -> None:
    sample, text = asked("fact")
    codes = dict(re.findall(r"The code of the (\w+) is (\d{4})\.", text))
    assert len(codes) == len(set(codes.values())) == 8
    asks = [Words().encode(f"The code of the {place} is") for place in codes]
    place = list(codes)[asks.index(list(sample.request.forced[-6:]))]
    assert len(sample.request.forced) == 806 == sample.request.max_tokens - 8
    assert judged(sample, f" {codes.pop(place)}.") == {"fact": 1.0}
    assert judged(sample, f" {codes.popitem()[1]}.") == {"fact": 0.0}


def test_a_word_begins_every_line() -> None:
    sample, text = asked("word")
    (word,) = re.findall(r'"(\w+)"', text)
    found = judged(sample, numbered(lambda k: f"{word}, it is {k}" if k > 3 else f"It is {k}"))
    assert found["kept"] == pytest.approx(1 - 3 / LINES)
    assert found["kept@late"] == 1.0
    # The others are missing.
    found = judged(sample, f" {word} it is.\n2. {word.upper()} it was.")
    assert (found["kept"], found["kept@late"]) == (pytest.approx(2 / LINES), 0.0)


def test_every_line_is_about_the_thing_that_is_its_turn() -> None:
    sample, text = asked("forbidden")
    (named,) = re.findall(r"in this order: ([^.]+)\.", text)
    things = named.split(", ")
    assert len(things) == len(set(things)) == LINES
    assert judged(sample, numbered(lambda k: f"{things[k - 1].title()}s {k}"))["named"] == 1.0
    found = judged(sample, numbered(lambda k: f"{things[0]} {k}"))
    assert found["named"] == pytest.approx(1 / LINES)
    other, _ = asked("language")
    assert "named" not in judged(other, numbered(lambda _: "Eso es el mar."))


def test_the_word_changes_in_the_middle() -> None:
    sample, text = asked("switch")
    first, then = re.findall(r'"(\w+)"', text)
    half = LINES // 2
    assert f"Sentences 1 to {half} begin" in text
    right = judged(sample, numbered(lambda k: f"{first if k <= half else then} {k}"))
    assert (right["kept"], right["kept@late"]) == (1.0, 1.0)
    wrong = judged(sample, numbered(lambda k: f"{first} {k}"))
    assert wrong["kept"] == pytest.approx(half / LINES)
    assert wrong["kept@late"] == 0.0


@pytest.mark.parametrize(
    ("language", "line"),
    [
        ("Spanish", "Los bosques son el hogar de muchos animales."),
        ("German", "Die Wälder sind das Zuhause vieler Tiere."),
        ("French", "Les forêts sont la maison de beaucoup d'animaux."),
    ],
)
def test_languages_are_told_from_english(language: str, line: str) -> None:
    # Drawn per sample: of so many one has it.
    model = Listener()
    samples = MEASURES["reasoning"].samples(model, Sizes(reasoning=144, answer_tokens=300))
    sample = next(
        sample
        for sample, text in zip(samples, model.told, strict=True)
        if f"in {language}." in text
    )
    assert sample.secret.rule(1, line)
    assert not sample.secret.rule(1, "Forests are the home of many animals.")


def test_a_forbidden_word_is_found() -> None:
    sample, text = asked("forbidden")
    (word,) = re.findall(r'"(\w+)"', text)
    assert judged(sample, numbered(lambda k: f"Nothing {k}"))["kept"] == 1.0
    assert judged(sample, numbered(lambda k: f"It {word.upper()} {k}"))["kept"] == 0.0
