# SPDX-License-Identifier: Apache-2.0
"""Answers from what was kept: all rungs of one sample at once, over one copy of the prompt's KV.

Generating is bound by reading the weights, so a batch of fifty rungs costs little more than one. Nothing is
gathered: rows share the prompt's keys and values, and each has a mask per layer and KV head. Keys are rotated
already, so a token's neighbours do not matter. What a row reads and says itself, it alone sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loadtest.quality.ladder.attention import KV, appended, shared_attention
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import Prompt, Reading

__all__ = ["Answer", "Answering", "Done", "answers", "begin"]

Done = Callable[[str], bool]
"""Whether an answer that says this need not go on."""

ROWS = 96
"""At a time: what they hold while they read a question stays below a GiB."""


@dataclass(frozen=True)
class Answer:
    """One that is begun.

    Attributes:
        unread: tokens that are to be read before it goes on.
        said: its tokens so far; those that are unread, too, if there are any.
    """

    unread: list[int]
    said: list[int] = field(default_factory=list)

    def text(self, model: LadderModel) -> str:
        """What has been said."""
        text: str = model.tokenizer.decode(self.said, skip_special_tokens=True)
        return text

    def ended(self, model: LadderModel, done: Done) -> bool:
        """Whether the model ended it, or it need not go on."""
        return bool(self.said) and (self.said[-1] in model.ends or done(self.text(model)))


class Answering:
    """R rows behind one prompt.

    Args:
        layers: the prompt's KV. kept: who of it is there, [L, R, KH, S].
    """

    def __init__(self, layers: list[KV], kept: Tensor) -> None:
        self._layers = layers
        self._kept = list(kept)
        self._own: dict[int, KV] = {}
        """What rows have read and said themselves, [R, KH, N, D]."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A stage's."""
        own = appended(self._own.get(layer), key, value)
        self._own[layer] = own
        grouped = query.unflatten(1, (key.shape[1], -1))
        mixed = shared_attention(grouped, self._layers[layer], self._kept[layer], own, scaling)
        return mixed.flatten(1, 2)

    def leave(self, staying: Tensor) -> None:
        """Only these rows, [R] of indices, go on."""
        self._kept = [kept[staying] for kept in self._kept]
        self._own = {
            layer: KV(kv.keys[staying], kv.values[staying]) for layer, kv in self._own.items()
        }


def begin(
    reading: Reading, prefix: list[int], done: Done, delays: Collection[int]
) -> Iterator[tuple[int, tuple[Prompt, Answer]]]:
    """Per delay: what has been read when it is over, and the answer so far, greedily from all of the KV."""
    if not delays:
        return
    prompt = reading.read(prefix)
    answer = Answer([], [reading.following])
    for tokens in range(max(delays) + 1):
        if tokens in delays:
            yield tokens, (prompt, Answer([answer.said[-1]], list(answer.said)))
        if not answer.ended(reading.model, done):
            prompt = reading.read(answer.said[-1:])
            answer.said.append(reading.following)


def answers(
    model: LadderModel, layers: list[KV], kept: Tensor, begun: Answer, done: Done, limit: int
) -> list[str]:
    """How each row of ``kept``, [L, R, KH, S], goes on with an answer, greedily.

    A row ends where the model ends it, after ``limit`` tokens, or when it is done.
    """
    if begun.ended(model, done) or len(begun.said) >= limit:
        return [Answer([], begun.said[:limit]).text(model)] * kept.shape[1]
    found: list[str] = []
    for part in kept.split(ROWS, 1):
        rows = _continue(model, Answering(layers, part), part, begun, done, limit)
        found += [row.text(model) for row in rows]
    return found


def _continue(
    model: LadderModel, stage: Answering, kept: Tensor, begun: Answer, done: Done, limit: int
) -> list[Answer]:
    rows = [Answer(begun.unread, list(begun.said)) for _ in range(kept.shape[1])]
    going, position = rows, kept.shape[3]
    logits = model.forward(stage, torch.tensor([begun.unread] * len(rows)), position)
    position += len(begun.unread)
    while True:
        for row, token in zip(going, logits[:, -1].argmax(-1).tolist(), strict=True):
            row.said.append(token)
        if len(going[0].said) >= limit:
            return rows
        staying = [place for place, row in enumerate(going) if not row.ended(model, done)]
        if not staying:
            return rows
        if len(staying) < len(going):
            stage.leave(torch.tensor(staying))
        going = [going[place] for place in staying]
        logits = model.forward(stage, torch.tensor([row.said[-1:] for row in going]), position)
        position += 1
