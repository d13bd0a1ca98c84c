# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks: what is asked can be answered from the text, and the text is as long as it should be."""

import re
from collections import Counter

import pytest

from loadtest.quality.ruler.tasks import NEEDLES, QUESTIONS, TASKS, sample

LENGTH = 1200


def count(text: str) -> int:
    """About a token."""
    return len(re.findall(r"\w{1,4}|\W", text))


@pytest.mark.parametrize("task", TASKS)
def test_the_longest_prompt_that_fits(task: str) -> None:
    example = sample(task, 3, LENGTH, count)
    taken = count(example.text) + example.max_tokens
    # A unit of haystack: for cwe six numbered words, for vt five sentences, a document for questions.
    unit = 120 if task in QUESTIONS else 60
    assert LENGTH - unit < taken <= LENGTH
    assert example == sample(task, 3, LENGTH, count), "the same seed, the same text"
    assert example.context != sample(task, 4, LENGTH, count).context
    assert all(answer in example.context for answer in example.answers)
    assert not any(answer in example.question + example.prefix for answer in example.answers)


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_say_what_is_asked(task: str) -> None:
    wanted, example = NEEDLES[task], sample(task, 0, LENGTH, count)
    found = dict.fromkeys(
        re.findall(r"special magic \w+ for (\S+) is: (\S+?)\.(?:\s|$)", example.context)
    )
    asked = [value for key, value in found if f" {key}" in example.question]
    assert Counter(asked) == Counter(example.answers)
    assert len(example.answers) == wanted.num_values * wanted.num_queries
    if wanted.haystack != "needle":
        assert len(found) == wanted.num_keys * wanted.num_values
    assert len({key for key, _ in found}) == len(found) / wanted.num_values, "no key twice"


def test_variables_are_tracked_through_their_chain() -> None:
    example = sample("vt", 0, LENGTH, count)
    value = re.findall(r"the value (\d+)", example.question)
    text = example.context[example.context.rindex("Memorize and track") :]
    assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
    assert len(assigned) == 5

    def resolved(name: str) -> str:
        return resolved(assigned[name]) if name in assigned else name

    assert {name for name in assigned if resolved(name) == value[0]} == set(example.answers)
    assert example.context.count("Memorize and track") == 2, "a worked example comes first"


def test_common_words_are_the_most_common() -> None:
    example = sample("cwe", 0, LENGTH, count)
    listed = example.context[example.context.rindex("Memorize the ones") :]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
    assert {word for word, _ in counts.most_common(10)} == set(example.answers)
    assert {counts[word] for word in example.answers} == {6}


def test_frequent_words_are_the_most_frequent() -> None:
    example = sample("fwe", 0, LENGTH, count)
    counts = Counter(re.findall(r"\b[a-z]{6}\b", example.context.partition("coded words. ")[2]))
    assert [word for word, _ in counts.most_common(3)] == list(example.answers)
    assert example.context.count("...") > counts[example.answers[0]], "the top rank is noise"


@pytest.mark.parametrize("task", QUESTIONS)
@pytest.mark.parametrize("number", range(8))
def test_questions_are_answered_by_one_document_or_through_two(task: str, number: int) -> None:
    example = sample(task, number, LENGTH, count)
    documents = example.context.split("Document ")[1:]
    (name,) = re.findall(r"([A-Z]\w+ [A-Z]\w+?)(?: born| learn| finish|\?)", example.question)
    (life,) = [text for text in documents if subject(text) == name]
    if task == "qa_2":
        (teacher,) = [one for one in map(subject, documents) if one != name and one in life]
        assert example.answers[0] not in life
        (life,) = [text for text in documents if subject(text) == teacher]
    assert example.answers[0] in life
    assert len(set(map(subject, documents))) == len(documents)


def subject(life: str) -> str:
    """Whose."""
    who = r"(?:(\S+ \S+) \(\d+ to)|(?:, (\S+ \S+) became)|(?:the [a-z ]+ (\S+ \S+) famous)"
    return next(filter(None, next(iter(re.findall(who, life)))))
