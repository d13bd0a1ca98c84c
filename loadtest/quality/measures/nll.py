# SPDX-License-Identifier: Apache-2.0
"""Teacher-forced negative log-likelihood of long real texts, by position.

The first tokens of a text are the prompt, the rest is forced token by token through decode steps with
eviction on, so that the model reads it as it would read its own words. In nats per token. The first forced
token is predicted by the prompt's own pass, before any eviction.
"""

import itertools
import math
from typing import ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.passages import passages
from loadtest.quality.sizes import Sizes

BINS = 4
"""Positions are put together into so many parts of equal length."""


def forced_samples(model: Model, sizes: Sizes) -> list[Sample]:
    """Texts of :mod:`loadtest.quality.passages`, then later parts of the same ones.

    Raises:
        ValueError: there is not that much text.
    """
    length = sizes.prompt_tokens + sizes.forced_tokens
    texts = [(name, model.encode(text)) for name, text in passages()]
    samples: list[Sample] = []
    for part in range(sizes.nll):
        for name, tokens in texts:
            # A part is wanted whole; short texts are used up first.
            piece = tokens[part * length : (part + 1) * length]
            if len(piece) == length and len(samples) < sizes.nll:
                prompt, forced = piece[: sizes.prompt_tokens], piece[sizes.prompt_tokens :]
                request = GenerationRequest(
                    tuple(prompt), len(forced), forced=tuple(forced), ignore_eos=True, logprobs=True
                )
                samples.append(Sample(f"{name}-{part}", request))
    if len(samples) < sizes.nll:
        raise ValueError(
            f"--samples: {sizes.nll} texts of {length} tokens wanted, {len(samples)} found"
        )
    return samples


def in_bins(name: str, values: list[float]) -> dict[str, float]:
    """The mean of ``values``, and of each part of them as ``name@1`` ... ."""
    found = {name: math.fsum(values) / len(values)}
    edges = [i * len(values) // BINS for i in range(BINS + 1)]
    for number, (start, end) in enumerate(itertools.pairwise(edges), 1):
        found[f"{name}@{number}"] = math.fsum(values[start:end]) / max(1, end - start)
    return found


class NLL(Measure):
    """How likely the model finds the text."""

    name = "nll"
    forces = True
    metrics: ClassVar = (
        Metric("nll", "NLL of real text, loss against full KV, %", "loss", "low", 100, 2),
        Metric("nll", "NLL of real text, nats per token", better="low", digits=3),
        *(
            Metric(
                f"nll@{part}",
                f"NLL loss in part {part} of {BINS} of the forced text, %",
                "loss",
                "low",
                100,
                2,
            )
            for part in range(1, BINS + 1)
        ),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        return forced_samples(model, sizes)

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        return in_bins("nll", [-one for one in answer.logprobs])
