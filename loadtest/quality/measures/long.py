# SPDX-License-Identifier: Apache-2.0
"""Long generation, where what is evicted are the model's own words: does it go round in circles?

Chat questions that want a long answer in steps; greedy, to the model's end token or the limit. All figures
but length are of words, so that a server can be measured as well as an engine.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.rouge import overlap, require
from loadtest.quality.sizes import Sizes

__all__ = ["Long", "common_prefix", "distinct", "longest_repeat"]

NGRAM = 4

QUESTIONS = (
    "Explain step by step how a bill becomes a law, and why each step exists.",
    "A train leaves at 9:00 and travels 60 km/h; another leaves the same station at 10:00 at 90 km/h. "
    "When does the second catch up? Reason step by step and check your answer in two other ways.",
    "Write a detailed plan for a vegetable garden of 20 square metres, month by month for one year.",
    "Tell the story of a lighthouse keeper who finds a letter in a bottle, in many paragraphs.",
    "Describe in detail how a computer starts, from the power button to the login screen.",
    "Compare the Roman Republic and the Roman Empire: government, army, economy, culture, decline.",
    "Write a complete beginner's guide to baking bread, with every step, its reason and common mistakes.",
    "How does the human heart work? Follow a drop of blood on its way through the whole body.",
    "Plan a ten day journey through Italy by train. Give each day its towns, sights, meals and costs.",
    "Explain photosynthesis to a curious twelve year old, then again to a student of biology.",
    "Write a dialogue between a teacher and a pupil about why the sky is blue and sunsets are red.",
    "List and explain twenty ways in which a small shop can save energy, with an estimate for each.",
    "Explain how to write a Python program that keeps the books of a library, part by part.",
    "Discuss at length whether cities should ban cars from their centres: both sides, then a verdict.",
    "Write the history of writing, from clay tablets to the printing press to the screen.",
    "A farmer has chickens and rabbits, 35 heads and 94 legs. How many of each? Solve it with algebra, by "
    "trial and by drawing, and explain every step.",
)


def distinct(words: list[str], size: int = NGRAM) -> float:
    """Share of n-grams that are different from all before; 1 of a text too short to have two."""
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(words: list[str]) -> float:
    """The longest run of words that comes twice, as a share of all words. The two may overlap."""
    best = 0
    # ends[j]: how long the runs are that end at the word before i and at word j.
    ends = [0] * len(words)
    for i in range(1, len(words)):
        for j in range(i - 1, -1, -1):
            ends[j] = (ends[j - 1] if j else 0) + 1 if words[i] == words[j] else 0
            best = max(best, ends[j])
    return best / len(words) if words else 0.0


def common_prefix(words: list[str], others: list[str]) -> float:
    """Words that both begin with, as a share of the longer one; 1 if both are empty."""
    longer = max(len(words), len(others))
    same = 0
    for one, other in zip(words, others, strict=False):
        if one != other:
            break
        same += 1
    return same / longer if longer else 1.0


class Long(Measure):
    """What becomes of long answers."""

    name = "long"
    generation = "long"
    metrics: ClassVar = (
        Metric(
            "distinct",
            f"long answers: different {NGRAM}-grams of words, %",
            better="high",
            scale=100,
            pictured=True,
        ),
        Metric(
            "repeat", "long answers: longest repeated run, % of the words", better="low", scale=100
        ),
        Metric("tokens", "long answers: tokens", digits=0),
        Metric("ended", "long answers: ended by themselves, %", scale=100, digits=0),
        Metric(
            "prefix",
            "long answers: same words as full KV from the beginning on, %",
            better="high",
            scale=100,
        ),
        Metric(
            "overlap",
            "long answers: words in common with full KV's (ROUGE-1), %",
            better="high",
            scale=100,
            pictured=True,
        ),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        require()
        if sizes.long > len(QUESTIONS):
            raise ValueError(f"--samples: long={sizes.long}, there are {len(QUESTIONS)}")
        return [
            Sample(f"long-{number}", GenerationRequest(question, sizes.long_tokens, chat=True))
            for number, question in enumerate(QUESTIONS[: sizes.long])
        ]

    @override
    def values(
        self, sample: Sample, answer: GenerationOutput, full: GenerationOutput
    ) -> dict[str, float]:
        words = answer.text.split()
        return {
            "distinct": distinct(words),
            "repeat": longest_repeat(words),
            "tokens": answer.tokens,
            "ended": float(answer.ended),
            "prefix": common_prefix(words, full.text.split()),
            "overlap": overlap(full.text, answer.text),
        }
