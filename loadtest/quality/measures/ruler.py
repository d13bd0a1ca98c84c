# SPDX-License-Identifier: Apache-2.0
"""RULER through an engine or a server: what of a long prompt is found, the question being its end.

Completions with RULER's plain template: the prompt ends with the beginning of the answer, so eviction begins
when the question is known. Asked later it would be a second turn over the same cache, which an engine
does not offer to requests with budgets: ``loadtest.quality.ladder`` measures that without one.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.ruler.match import match_all
from loadtest.quality.ruler.tasks import TASKS, sample
from loadtest.quality.sizes import Sizes

__all__ = ["Ruler"]


class Ruler(Measure):
    """Whether what is asked for is found."""

    name = "ruler"
    generation = "ruler"
    usual = False
    metrics: ClassVar = (
        Metric("found", "RULER, question known, %", "mean", "high", 100, 1, pictured=True),
        Metric("found", "RULER, question known, % of full KV's", "ratio", "high", 100, 1),
        *(Metric(task, f"RULER {task}, %", "mean", "high", 100, 0) for task in TASKS),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        found = []
        for place in range(sizes.ruler):
            # Any number of samples has the tasks evenly.
            number, task = place // len(TASKS), TASKS[place % len(TASKS)]
            example = sample(task, number, sizes.ruler_tokens, model.count)
            request = GenerationRequest(example.text, example.max_tokens)
            name = f"{task}-{sizes.ruler_tokens}-{number}"
            found.append(Sample(name, request, example.answers, {"task": task}))
        return found

    @override
    def values(
        self, sample: Sample, answer: GenerationOutput, full: GenerationOutput
    ) -> dict[str, float]:
        found = match_all(answer.text, sample.secret)
        return {"found": found, sample.description["task"]: found}
