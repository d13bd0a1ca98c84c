# SPDX-License-Identifier: Apache-2.0
"""What the quality run asks, and how it judges an answer."""

import pytest

from loadtest.quality.generation import GenerationOutput
from loadtest.quality.measures import MEASURES
from loadtest.quality.measures.retrieval import first_number
from loadtest.quality.sizes import Sizes
from tests.loadtest.quality.quality_words import SIZES, Words


def test_forced_texts_are_cut_into_prompt_and_continuation() -> None:
    nll = MEASURES["nll"].samples(Words(), SIZES)
    assert len(nll) == 3
    assert {len(sample.request.prompt) for sample in nll} == {40}
    assert {len(sample.request.forced) for sample in nll} == {8}
    with pytest.raises(ValueError, match="texts of"):
        MEASURES["nll"].samples(Words(), Sizes(nll=3, prompt_tokens=10**6))


def test_own_answers_are_forced_behind_the_prompts_that_they_answer() -> None:
    model, own = Words(), MEASURES["own"]
    samples = own.samples(model, Sizes(own=2, answer_tokens=800))
    assert [task.request.forced for task in model.requests] == [(), ()] and len(samples) == 2
    for sample, asked in zip(samples, model.requests, strict=True):
        assert not asked.fields and sample.request.prompt == asked.request.prompt
        assert sample.request.forced == tuple(model.encode("a b c"))
        assert sample.request.max_tokens == 3 and sample.request.ignore_eos
    assert own.values(samples[0], GenerationOutput("", 1.0, (-1.0, -2.0, -3.0)))["own"] == 2.0


@pytest.mark.parametrize(
    ("text", "number"), [(" 4821.\nQ: 77", "4821"), (" is 1, or 52", "52"), ("none", None)]
)
def test_the_first_number_is_the_answer(text: str, number: str | None) -> None:
    assert first_number(text) == number


def test_facts_are_asked_for_in_three_ways_in_the_same_text() -> None:
    model = Words()
    samples = MEASURES["retrieval"].samples(model, SIZES)
    assert len({sample.name for sample in samples}) == len(samples) == 12
    before, end, later = samples[:3]
    assert [sample.description["way"] for sample in samples[:3]] == ["before", "end", "later"]
    assert before.secret == end.secret == later.secret
    assert str(end.request.prompt).count(end.secret) == 1
    assert str(before.request.prompt).count("What is the secret code of the ") == 2
    assert str(end.request.prompt).count("What is the secret code of the ") == 1
    assert [*later.request.prompt, *later.request.forced] == model.encode(end.request.prompt), (
        "the same tokens"
    )
    assert samples[3].request.prompt.count("The secret code of the ") == 3, (
        "two facts and the answer"
    )
    # The next depth, with other filler.
    assert samples[6].description["depth"] != samples[0].description["depth"]
    found = MEASURES["retrieval"].values(end, GenerationOutput(f" {end.secret}.", 1.0))
    assert found == {"end": 1.0, "needle": 1.0}


def test_ruler_is_asked_with_the_beginning_of_the_answer() -> None:
    model = Words()
    samples = MEASURES["ruler"].samples(model, Sizes(ruler=14, ruler_tokens=1500))
    assert len({sample.name for sample in samples}) == 28, "14 examples, two ways each"
    known, later = samples[:2]
    assert known.description == samples[26].description == {"task": "niah_single_1", "way": "known"}
    assert later.description == {"task": "niah_single_1", "way": "later"}
    assert str(known.request.prompt).endswith("mentioned in the provided text is")
    assert model.count(str(known.request.prompt)) + known.request.max_tokens <= 1500
    tokens = model.encode(str(known.request.prompt))
    assert [*later.request.prompt, *later.request.forced] == tokens, "what is read is the same"
    assert later.request.max_tokens == len(later.request.forced) + known.request.max_tokens
    question = len(later.request.forced)
    assert 10 < question < 60, (
        "the question and the beginning of the answer, and nothing of the text"
    )
    for asked, way in ((known, "known"), (later, "later")):
        answer = GenerationOutput(f" {asked.secret[0]}.", 1.0)
        found = MEASURES["ruler"].values(asked, answer)
        assert found == {way: 1.0, "niah_single_1": 1.0}


def test_a_chats_first_message_has_the_fact_that_the_last_one_asks_for() -> None:
    told: list[tuple[str, ...]] = []

    class Listener(Words):
        def chat(self, *texts: str) -> tuple[int, ...]:
            told.append(texts)
            return super().chat(*texts)

    measure = MEASURES["turns"]
    samples = measure.samples(Listener(), Sizes(turns=4))
    for sample, texts in zip(samples, told, strict=True):
        turns = sample.description["turns"]
        assert len(texts) == 2 * turns - 1
        place = texts[-1].removeprefix("What is the code of the ").partition("?")[0]
        assert f"The code of the {place} is {sample.secret}." in texts[0]
        assert not any(sample.secret in text for text in texts[1:])
        answer = GenerationOutput(f"It is {sample.secret}.", 1.0)
        assert measure.values(sample, answer) == {f"turn-{turns}": 1.0}
        assert measure.values(sample, GenerationOutput("It is 12.", 1.0)) == {f"turn-{turns}": 0.0}
    assert len({sample.request.prompt for sample in samples}) == 4
