# SPDX-License-Identifier: Apache-2.0
"""RULER on the ladder: one sample's prompt is read once, and every rung answers from what it keeps of it.

Two protocols, those of kvpress' evaluation: the question is ``known`` when tokens are chosen, or ``later``,
only afterwards. What follows (the question, if it comes later, the chat template's end and the beginning of
the answer) is read by each rung from what it kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from loadtest.quality.ladder.answers import answers
from loadtest.quality.ladder.keep import FULL, Rung, keep
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import around, encode, repetition
from loadtest.quality.ladder.reading import Prompt, read_prompt, repeat_prompt
from loadtest.quality.rows import Row
from loadtest.quality.ruler.example import Example
from loadtest.quality.ruler.match import match_all
from loadtest.quality.ruler.tasks import sample

__all__ = ["PROTOCOLS", "Asked", "measure_sample", "sample_name"]

PROTOCOLS = ("known", "later")

SLACK = 16
"""Tokens of an answer beside twice those that are wanted."""


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
    later, known = read_prompt(model, [before + context, question])
    if any(one.rung.repeats for one in asked):
        later = repeat_prompt(later, repetition(model, context))
    known = replace(known, most=later.most, sums=later.sums)
    prefix = after + encode(model, example.prefix)
    read = time.monotonic() - started
    rests = {"known": prefix, "later": question + prefix}
    for protocol, prompt in (("known", known), ("later", later)):
        mine = [one for one in asked if one.protocol == protocol]
        texts = _answer(model, prompt, mine, rests[protocol], example, limit, number)
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


def _answer(
    model: LadderModel, prompt: Prompt, asked: Sequence[Asked], rest: list[int], example: Example,
    limit: int, seed: int,
) -> Iterable[str]:  # fmt: skip
    """What each says."""
    if not asked:
        return []
    # Who has said nothing of it after twice its length, will not.
    wanted = sum(len(encode(model, f" {answer}")) for answer in example.answers)
    limit = min(limit, example.max_tokens, SLACK + 2 * wanted)
    kept = torch.stack([_kept(prompt, one, seed) for one in asked], 1)
    return answers(model, prompt.layers, kept, rest, example, limit)


def _kept(prompt: Prompt, one: Asked, seed: int) -> torch.Tensor:
    if one.rung == FULL:
        heads = prompt.layers[0].keys.shape[0]
        return torch.ones(len(prompt.layers), heads, prompt.tokens, dtype=torch.bool)
    return keep(one.rung, prompt, one.budget, seed)
