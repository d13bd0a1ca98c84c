# SPDX-License-Identifier: Apache-2.0
"""XSUM on the ladder: a request is read once, and every rung writes its summary from what it keeps of it.

Requests, lengths and figures are those of the measure ``xsum``. Of ``xsum@N`` tokens are chosen when N more
than the first have been generated with all of the KV.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch

from loadtest.quality.generation import GenerationOutput, Model
from loadtest.quality.ladder.answers import answers, begin
from loadtest.quality.ladder.facts import Asked, delay_of
from loadtest.quality.ladder.keep import FULL, keep
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import encode
from loadtest.quality.ladder.reading import Reading
from loadtest.quality.measures.base import Sample
from loadtest.quality.measures.xsum import XSum
from loadtest.quality.rows import Row
from loadtest.quality.sizes import Sizes

__all__ = ["SUMMARIES", "measure_summary", "requests"]

SUMMARIES = "xsum"


def requests(file: Path, count: int) -> list[Sample]:
    """Those of the measure ``xsum``.

    Raises:
        ValueError: the file cannot be read, or has fewer.
    """
    # It asks nothing of a model.
    return XSum().samples(cast(Model, None), Sizes(xsum=count, xsum_file=file))


def measure_summary(model: LadderModel, sample: Sample, asked: Sequence[Asked]) -> Iterator[Row]:
    """The rows of one request, none of whose rungs repeats; full KV's are among them if ``asked`` says so."""
    started = time.monotonic()
    request = sample.request
    assert isinstance(request.prompt, str)

    def cut(text: str) -> str:
        for stop in request.stop:
            text = text.partition(stop)[0]
        return text

    def done(text: str) -> bool:
        return cut(text) != text

    reading = Reading(model)
    delays = {delay for one in asked if (delay := delay_of(one.protocol)) is not None}
    begun = begin(reading, encode(model, request.prompt), done, delays)
    for delay, (prompt, answer) in begun:
        mine = [one for one in asked if delay_of(one.protocol) == delay]
        rungs = [keep(one.rung, prompt, one.budget) for one in mine]
        kept = torch.stack([keep(FULL, prompt, 1.0), *rungs], 1)
        texts = answers(model, prompt.layers, kept, answer, done, request.max_tokens)
        full, *others = [_output(model, cut(text)) for text in texts]
        for one, output in zip(mine, others, strict=True):
            values = XSum().values(sample, output, full)
            yield Row(one.rung.name, one.budget, one.protocol, sample.name, values, one.budget)
    print(
        f"{sample.name}: {len(asked)} summaries in {time.monotonic() - started:.0f} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _output(model: LadderModel, text: str) -> GenerationOutput:
    return GenerationOutput(text=text, tokens=len(encode(model, text)), ended=True, held=1.0)
