# SPDX-License-Identifier: Apache-2.0
"""Answers of the ladder that begin with all of the KV, and go on with what a rung keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loadtest.quality.ladder.answers import Answer, answers, begin
from loadtest.quality.ladder.facts import delay_of, delayed, said_all
from loadtest.quality.ladder.keep import keep, parse_rung
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import Prompt, Reading
from tests.families.random_models import VOCABULARY

pytestmark = pytest.mark.usefixtures("single_thread")

LIMIT = 12
NOTHING_WANTED = said_all(["never said"])


@pytest.fixture(scope="module")
def model(directory: str) -> LadderModel:
    made = LadderModel(directory, torch.float32)
    made._tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: " ".join(map(str, ids))
    )
    return made


@pytest.fixture(scope="module")
def context() -> list[int]:
    source = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (150,), generator=source).tolist()


def said(model: LadderModel, prompt: Prompt, begun: Answer, kept: torch.Tensor) -> list[str]:
    (text,) = answers(model, prompt.layers, kept[:, None], begun, NOTHING_WANTED, LIMIT)
    return text.split()


def everyone(prompt: Prompt) -> torch.Tensor:
    return torch.ones(len(prompt.layers), 2, prompt.tokens, dtype=torch.bool)


def test_a_delayed_answer_begins_as_with_full_kv(model: LadderModel, context: list[int]) -> None:
    reading = Reading(model)
    prompt = reading.read(context)
    full = said(model, prompt, Answer([7, 8]), everyone(prompt))
    assert len(full) == LIMIT
    squeezed = said(model, prompt, Answer([7, 8]), keep(parse_rung("h2o"), prompt, 0.1))
    assert squeezed != full, "nothing can be learnt of this prompt"
    for delay, (later, begun) in begin(reading, [7, 8], NOTHING_WANTED, {0, 5, LIMIT}):
        assert later.tokens == len(context) + 2 + delay
        assert said(model, later, begun, everyone(later)) == full
        kept = said(model, later, begun, keep(parse_rung("h2o"), later, 0.1))
        assert kept[: delay + 1] == full[: delay + 1]
        assert (kept == full) == (delay == LIMIT)


def test_an_answer_that_has_ended_stays(model: LadderModel, context: list[int]) -> None:
    reading = Reading(model)
    reading.read(context)
    first = str(next(iter(begin(reading, [7], NOTHING_WANTED, {0})))[1][1].said[0])
    reading = Reading(model)
    reading.read(context)
    wanted = said_all([first])
    ((_, (prompt, begun)),) = begin(reading, [7], wanted, {4})
    assert begun.said == [int(first)] and prompt.tokens == len(context) + 1
    assert answers(model, prompt.layers, everyone(prompt)[:, None], begun, wanted, LIMIT) == [first]


@pytest.mark.parametrize(
    ("protocol", "delay"), [("known", None), ("later", None), ("known@16", 16)]
)
def test_delays_are_part_of_a_protocols_name(protocol: str, delay: int | None) -> None:
    assert delay_of(protocol) == delay
    assert delay is None or delayed(delay) == protocol
