# SPDX-License-Identifier: Apache-2.0
"""Looking ahead is reading on with the tokens that a model would say, and leaves no trace of them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from loadtest.quality.ladder.ahead import AHEAD, look_ahead
from loadtest.quality.ladder.forcing import Forcing
from loadtest.quality.ladder.keep import keep, parse_rung
from loadtest.quality.ladder.likelihood import force
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import Prompt, Reading, read_prompt
from loadtest.quality.ladder.scores import scores_of

pytestmark = pytest.mark.usefixtures("single_thread")

OPENING = [5, 6]


@pytest.fixture(scope="module")
def prompt(model: LadderModel, tokens: list[int]) -> Prompt:
    return read_prompt(model, [tokens])[0]


def continuation(directory: str, tokens: list[int]) -> list[int]:
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    said = plain.generate(
        torch.tensor([tokens]), max_new_tokens=AHEAD, do_sample=False, eos_token_id=None
    )
    return said[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", ["draft", "pseudo"])
def test_it_sees_what_reading_on_would_see(
    directory: str, model: LadderModel, tokens: list[int], name: str
) -> None:
    reading = Reading(model)
    before = reading.read(tokens)
    ahead = {
        "draft": OPENING + continuation(directory, tokens + OPENING),
        "pseudo": tokens[:AHEAD],
    }
    after = reading.read(ahead[name])
    found = look_ahead(before, {name}, tokens, OPENING)
    assert found.layers is before.layers and not before.ahead
    for layer, notes in enumerate(after.notes):
        given = notes.total[:, : len(tokens)] - before.notes[layer].total
        torch.testing.assert_close(found.ahead[name][layer], given, rtol=0, atol=1e-3)


def test_scores_are_pooled_like_those_of_the_prompts_end(prompt: Prompt, tokens: list[int]) -> None:
    looked = look_ahead(prompt, {"pseudo"}, tokens, OPENING)
    scores, sums = scores_of("pseudo", looked, 100)[1, 0], looked.ahead["pseudo"][1][0, :100]
    # A neighbour's counts a little less, so that neighbours do not tie.
    assert float(scores[50]) == pytest.approx(float(sums[47:54].max()), rel=3e-5)
    assert float(scores[99]) == pytest.approx(float(sums[96:].max()), rel=3e-5), (
        "recent tokens have no say"
    )


def test_rows_go_on_with_what_later_queries_give(
    model: LadderModel, prompt: Prompt, tokens: list[int]
) -> None:
    looked = look_ahead(prompt, {"draft", "pseudo"}, tokens, OPENING)
    rungs = [parse_rung(name) for name in ("draft", "caote/draft/keydiff:0.25", "snapkv")]
    stage = Forcing(looked, rungs, 0.3, 8)
    stage.evict()
    first = keep(rungs[0], looked, 0.3)
    # Recent windows begin at the nearest block.
    assert float((stage.alive[1][0] == first[1]).float().mean()) > 0.9
    assert not torch.equal(stage.alive[1][0], stage.alive[1][2])
    force(model, stage, 3, [5] * 41)
    assert [stage.held(row) for row in range(3)] == [stage.held(2)] * 3
