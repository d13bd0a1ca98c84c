# SPDX-License-Identifier: Apache-2.0
"""Teacher-forced negative log-likelihood of the model's own answers: those that full KV gives.

A problem is right or wrong, so problems tell two policies apart in hundreds; each token of an answer says how
far eviction moves the model from it. The answers are those to the problems of ``reasoning``.
"""

from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, Model, Task
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.measures.nll import in_bins
from loadtest.quality.measures.reasoning import word_problems
from loadtest.quality.sizes import Sizes


class Own(Measure):
    """How likely the model finds its own answers to word problems."""

    name = "own"
    forces = True
    metrics: ClassVar = (
        Metric("own", "NLL of own answers, loss against full KV, %", "loss", "low", 100, 1),
        Metric("own", "NLL of own answers, nats per token", better="low", digits=3),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        asked = [word_problems(model, number, sizes) for number in range(sizes.own)]
        answers: dict[str, tuple[int, ...]] = {}

        def done(one: Sample, output: GenerationOutput) -> None:
            answers[one.name] = tuple(model.encode(output.text))

        model.run((Task(one, one.request, {}) for one in asked), done)
        return [
            replace(
                one,
                request=replace(
                    one.request,
                    max_tokens=len(answers[one.name]),
                    forced=answers[one.name],
                    ignore_eos=True,
                    logprobs=True,
                ),
            )
            for one in asked
        ]

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        return in_bins("own", [-one for one in answer.logprobs])
