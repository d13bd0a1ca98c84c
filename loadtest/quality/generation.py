# SPDX-License-Identifier: Apache-2.0
"""What a measure wants generated, what came back, and what can generate. Imports nothing of ours."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class GenerationRequest:
    """One greedy generation.

    Attributes:
        prompt: text, or token ids where a measure has to know them.
        max_tokens: how many tokens to generate at most, ``forced`` ones included.
        forced: the first tokens of the output, whatever the model would have generated.
        ignore_eos: whether to go on to ``max_tokens`` in any case.
        logprobs: whether to report the log-probability of each token.
        enough: says of a text whether nothing behind it changes what it is worth; generation may end there.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    forced: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    enough: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class GenerationOutput:
    """What came back.

    Attributes:
        text: the output without the forced tokens.
        held: KV tokens held at the end over tokens seen.
        tokens: how many were generated.
        logprobs: of each generated token, if they were asked for.
    """

    text: str
    held: float
    logprobs: tuple[float, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Task(Generic[Tag]):
    """One request under one policy and budget; ``tag`` is the caller's."""

    tag: Tag
    request: GenerationRequest
    fields: dict[str, Any]


class Model(ABC):
    """A model that generates with budgets.

    Attributes:
        forces: whether it can force tokens and report log-probabilities.
        description: what its outputs have to be read with.
    """

    forces: bool
    description: dict[str, Any]

    @abstractmethod
    def count(self, text: str) -> int:
        """Tokens of a text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special ones. Only where :attr:`forces`."""

    @abstractmethod
    def chat(self, *texts: str) -> tuple[int, ...]:
        """Token ids of a chat, as the model's template has it, up to where it answers.

        Args:
            texts: messages of the user and of the model in turn; the last one is the user's.

        Raises:
            ValueError: the model has no template.
        """

    @abstractmethod
    def run(
        self, tasks: Iterable[Task[Tag]], done: Callable[[Tag, GenerationOutput], None]
    ) -> None:
        """GenerationOutput all, many at a time; each is handed to ``done`` when it is there, in any order."""

    def close(self) -> None:
        """Let go of what it holds."""
        return
