# SPDX-License-Identifier: Apache-2.0
"""The contract of a measure: what it asks, and what one answer is worth."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.sizes import Sizes


@dataclass(frozen=True)
class Sample:
    """One thing to request.

    Attributes:
        name: the same in every run of the same sizes; no two are equal.
        secret: what the measure needs to judge the answer; never written.
        description: what kind of sample it is; written into its rows.
    """

    name: str
    request: GenerationRequest
    secret: Any = None
    description: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One figure of a measure.

    Attributes:
        key: of ``values``. A sample without it has no part in it.
        title: what a table of it is called, with its unit.
        shown: ``mean`` of the samples; ``loss``: by how many percent that mean is above full KV's on the same
            samples; ``ratio``: that mean over full KV's.
        better: whether high or low is good; ``None`` where it is neither.
        scale, digits: how it is printed.
    """

    key: str
    title: str
    shown: Literal["mean", "loss", "ratio"] = "mean"
    better: Literal["high", "low"] | None = None
    scale: float = 1.0
    digits: int = 1


class Measure(ABC):
    """What is asked and how it is judged. Stateless."""

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    forces: ClassVar[bool] = False
    """Whether it needs :attr:`Model.forces`."""

    @abstractmethod
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        """What to ask.

        Raises:
            ValueError: something it needs is missing.
        """

    @abstractmethod
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        """Figures of one answer."""


def asked_later(model: Model, text: str, question: str, answer_tokens: int) -> GenerationRequest:
    """A question behind a prompt, as text that the model itself goes on with.

    Encoded as one, so that the tokens are those of a prompt that ends with the question.

    Args:
        text: the prompt. question: what is forced behind it. answer_tokens: generated at most, behind that.
    """
    tokens, start = model.encode(text + question), len(model.encode(text))
    forced = tuple(tokens[start:])
    return GenerationRequest(tuple(tokens[:start]), len(forced) + answer_tokens, forced=forced)
