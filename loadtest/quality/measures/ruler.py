# SPDX-License-Identifier: Apache-2.0
"""RULER through an engine or a server: what of a long prompt is found.

Completions with RULER's plain template. The question is ``known`` where it belongs to the prompt, with the
beginning of the answer behind it: eviction begins when it has been read. Or it comes ``later``: behind the
prompt, as text that the model itself goes on with (forced), and what went, went without knowing it. These are
kvpress' two protocols.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample, asked_later
from loadtest.quality.ruler.match import match_all
from loadtest.quality.ruler.tasks import TASKS, sample
from loadtest.quality.sizes import Sizes


class Ruler(Measure):
    """Whether what is asked for is found."""

    name = "ruler"
    metrics: ClassVar = (
        Metric("known", "RULER, question known, %", "mean", "high", 100, 1),
        Metric("known", "RULER, question known, % of full KV's", "ratio", "high", 100, 1),
        Metric("later", "RULER, question later, %", "mean", "high", 100, 1),
        Metric("later", "RULER, question later, % of full KV's", "ratio", "high", 100, 1),
        *(Metric(task, f"RULER {task}, both ways, %", "mean", "high", 100, 0) for task in TASKS),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        found = []
        for place in range(sizes.ruler):
            # Any number of samples has the tasks evenly.
            number, task = place // len(TASKS), TASKS[place % len(TASKS)]
            example = sample(task, number, sizes.ruler_tokens, model.count)
            enough = partial(_has_all, example.answers)
            requests = {"known": GenerationRequest(example.text, example.max_tokens, enough=enough)}
            if model.forces:
                question = example.question + example.prefix
                later = asked_later(model, example.context, question, example.max_tokens)
                requests["later"] = replace(later, enough=enough)
            found += [
                Sample(
                    f"{task}-{sizes.ruler_tokens}-{number}-{way}",
                    request,
                    example.answers,
                    {"task": task, "way": way},
                )
                for way, request in requests.items()
            ]
        return found

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        found = match_all(answer.text, sample.secret)
        return {sample.description["way"]: found, sample.description["task"]: found}


def _has_all(answers: Sequence[str], text: str) -> bool:
    return match_all(text, answers) == 1.0
