# SPDX-License-Identifier: Apache-2.0
"""Answers from what was kept: all rungs of one sample at once, over one copy of the prompt's KV.

Generating is bound by reading the weights, so a batch of fifty rungs costs little more than one. Nothing is
gathered: rows share the prompt's keys and values, and each has a mask per layer and KV head. Keys are rotated
already, so a token's neighbours do not matter. What a row reads and says itself, it alone sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.quality.ladder.attention import KV, appended, shared_attention
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ruler.example import Example
from loadtest.quality.ruler.match import match_all

__all__ = ["Answering", "answers"]

ROWS = 96
"""At a time: what they hold while they read a question stays below a GiB."""


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


def answers(
    model: LadderModel,
    layers: list[KV],
    kept: Tensor,
    rest: list[int],
    example: Example,
    limit: int,
) -> list[str]:
    """What each row of ``kept``, [L, R, KH, S], says after the tokens ``rest``, greedily.

    A row ends where the model ends it, after ``limit`` tokens, or when it has said all that was wanted.
    """
    found: list[str] = []
    for part in kept.split(ROWS, 1):
        found += _answers(model, layers, part, rest, example, limit)
    return found


def _answers(
    model: LadderModel,
    layers: list[KV],
    kept: Tensor,
    rest: list[int],
    example: Example,
    limit: int,
) -> list[str]:
    rows = kept.shape[1]
    stage, position = Answering(layers, kept), kept.shape[3]
    said: list[list[int]] = [[] for _ in range(rows)]
    texts = [""] * rows
    going = list(range(rows))
    logits = model.forward(stage, torch.tensor([rest] * rows), position)
    position += len(rest)
    for _ in range(limit):
        chosen = logits[:, -1].argmax(-1).tolist()
        staying = []
        for place, (row, token) in enumerate(zip(going, chosen, strict=True)):
            if token in model.ends:
                continue
            said[row].append(token)
            texts[row] = model.tokenizer.decode(said[row], skip_special_tokens=True)
            if match_all(texts[row], example.answers) < 1:
                staying.append(place)
        if not staying:
            break
        if len(staying) < len(going):
            stage.leave(torch.tensor(staying))
        going = [going[place] for place in staying]
        logits = model.forward(stage, torch.tensor([[said[row][-1]] for row in going]), position)
        position += 1
    return texts
