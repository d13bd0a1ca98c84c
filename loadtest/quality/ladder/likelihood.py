# SPDX-License-Identifier: Apache-2.0
"""NLL of real texts on the ladder: the texts of the measure ``nll``, all rungs of a text as one batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from loadtest.quality.generation import Model
from loadtest.quality.ladder.ahead import look_ahead
from loadtest.quality.ladder.forcing import Forcing
from loadtest.quality.ladder.keep import FULL, Rung
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import encode, repetition
from loadtest.quality.ladder.reading import read_prompt, repeat_prompt
from loadtest.quality.measures.base import Sample
from loadtest.quality.measures.nll import forced_samples, in_bins
from loadtest.quality.rows import Row
from loadtest.quality.sizes import Sizes

__all__ = ["measure_text", "texts"]

BLOCK = 32


def texts(model: LadderModel, sizes: Sizes) -> list[Sample]:
    """Those of the measure ``nll``."""

    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return encode(model, text)

    return forced_samples(cast(Model, Tokenizer()), sizes)


def measure_text(
    model: LadderModel, text: Sample, rungs: Sequence[Rung], budget: float
) -> Iterator[Row]:
    """The rows of one text at one budget."""
    started = time.monotonic()
    assert not isinstance(text.request.prompt, str)
    prompt = list(text.request.prompt)
    (read,) = read_prompt(model, [prompt])
    if any(rung.repeats for rung in rungs):
        read = repeat_prompt(read, repetition(model, prompt))
    if looks := {name for rung in rungs for name in rung.looks}:
        read = look_ahead(read, looks, prompt, list(text.request.forced)[:1])
    stage = Forcing(read, rungs, budget, BLOCK)
    losses = force(model, stage, len(rungs), list(text.request.forced))
    for row, rung in enumerate(rungs):
        values = in_bins("nll", losses[row].tolist())
        share = 1.0 if rung == FULL else budget
        yield Row(rung.name, share, "nll", text.name, values, stage.held(row) / stage.seen)
    print(
        f"{text.name} at {budget:g}: {len(rungs)} rungs in {time.monotonic() - started:.0f} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def force(model: LadderModel, stage: Forcing, rows: int, forced: list[int]) -> torch.Tensor:
    """NLL of the second forced token and those after it, [R, N - 1]."""
    losses, at, end = [], 0, len(forced) - 1
    while at < end:
        stage.evict()
        free = stage.room(end - at)
        tokens = torch.tensor([forced[at : at + free]] * rows)
        logits = model.forward(stage, tokens, stage.seen, keep=free).float()
        following = torch.tensor([forced[at + 1 : at + free + 1]] * rows)[..., None]
        losses.append(-logits.log_softmax(-1).gather(-1, following)[..., 0])
        at += free
    return torch.cat(losses, 1)
