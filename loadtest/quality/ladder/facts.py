# SPDX-License-Identifier: Apache-2.0
"""RULER on the ladder: one sample's prompt is read once, and every rung answers from what it keeps of it.

Two protocols are kvpress': the question is ``known`` when tokens are chosen, or it comes ``later``,
only afterwards. What follows (the question, if it comes later, the chat template's end and the beginning of
the answer) is read by each rung from what it kept. ``known@N`` is what a server sees: that end belongs to the
prompt, and tokens are chosen when N more have been generated with all of the KV.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from loadtest.quality.ladder.ahead import look_ahead
from loadtest.quality.ladder.answers import Answer, Done, answers, begin
from loadtest.quality.ladder.keep import Rung, keep
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import around, encode, repetition
from loadtest.quality.ladder.reading import Prompt, Reading, repeat_prompt
from loadtest.quality.rows import Row
from loadtest.quality.ruler.example import Example
from loadtest.quality.ruler.match import match_all
from loadtest.quality.ruler.tasks import sample

__all__ = [
    "KNOWN",
    "PROTOCOLS",
    "Asked",
    "delay_of",
    "delayed",
    "measure_sample",
    "said_all",
    "sample_name",
]

KNOWN = "known"
PROTOCOLS = (KNOWN, "later")

SLACK = 16
"""Tokens of an answer beside twice those that are wanted."""


def delayed(tokens: int, measure: str = KNOWN) -> str:
    """The measure where the first eviction comes ``tokens`` after the prompt."""
    return f"{measure}@{tokens}"


def delay_of(protocol: str) -> int | None:
    """The inverse of :func:`delayed`; ``None`` for the others."""
    _, _, tokens = protocol.partition("@")
    return int(tokens) if tokens else None


@dataclass(frozen=True)
class Asked:
    """A rung at a budget under a protocol."""

    protocol: str
    rung: Rung
    budget: float


def sample_name(task: str, number: int) -> str:
    """As rows have it."""
    return f"{task}-{number}"


def measure_sample(
    model: LadderModel, task: str, number: int, length: int, asked: Sequence[Asked], limit: int
) -> Iterator[Row]:
    """The rows of one sample; full KV's are among them if ``asked`` says so."""
    started = time.monotonic()
    example = sample(task, number, length, lambda text: len(encode(model, text)))
    before, after = around(model)
    context, question = encode(model, example.context), encode(model, example.question)
    prefix = after + encode(model, example.prefix)
    reading = Reading(model)
    later, known = reading.read(before + context), reading.read(question)
    starts = {"known": (known, Answer(prefix)), "later": (later, Answer(question + prefix))}
    delays = {delay for one in asked if (delay := delay_of(one.protocol)) is not None}
    for delay, start in begin(reading, prefix, said_all(example.answers), delays):
        starts[delayed(delay)] = start
    if any(one.rung.repeats for one in asked):
        repeated = repeat_prompt(later, repetition(model, context))
        for protocol, (prompt, answer) in starts.items():
            more = replace(prompt, most=repeated.most, sums=repeated.sums)
            starts[protocol] = more, answer
    for protocol, (prompt, answer) in starts.items():
        if looks := {look for one in asked if one.protocol == protocol for look in one.rung.looks}:
            # Whoever evicts before the end of the template knows no more than that it comes.
            opening = after if answer.unread and not answer.said else answer.unread
            starts[protocol] = look_ahead(prompt, looks, before + context, opening), answer
    read = time.monotonic() - started
    for protocol, (prompt, answer) in starts.items():
        mine = [one for one in asked if one.protocol == protocol]
        texts = _answer(model, prompt, mine, answer, example, limit, number)
        for one, text in zip(mine, texts, strict=True):
            yield Row(
                one.rung.name, one.budget, protocol, sample_name(task, number),
                {"found": match_all(text, example.answers)}, one.budget,
                {"task": task, "tokens": prompt.tokens},
            )  # fmt: skip
    taken = time.monotonic() - started
    print(
        f"{sample_name(task, number)}: {len(asked)} answers in {taken:.0f} s, {read:.0f} s of them read",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def said_all(wanted: Sequence[str]) -> Done:
    """Whether an answer contains all of them."""
    return lambda text: match_all(text, wanted) == 1


def _answer(
    model: LadderModel, prompt: Prompt, asked: Sequence[Asked], begun: Answer, example: Example,
    limit: int, seed: int,
) -> Iterable[str]:  # fmt: skip
    """What each says."""
    if not asked:
        return []
    # Who has said nothing of it after twice its length, will not.
    wanted = sum(len(encode(model, f" {answer}")) for answer in example.answers)
    limit = min(limit, example.max_tokens, SLACK + 2 * wanted)
    kept = torch.stack([keep(one.rung, prompt, one.budget, seed) for one in asked], 1)
    return answers(model, prompt.layers, kept, begun, said_all(example.answers), limit)
