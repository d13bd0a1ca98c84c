# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt with full attention, once, and noting all that any score will want to know.

The attention matrix is computed some queries at a time and never kept: what is kept are its column sums, its
last rows, and the first two moments of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from loadtest.quality.ladder.attention import KV, appended, causal_probabilities, mix
from loadtest.quality.ladder.model import LadderModel

__all__ = [
    "TAIL",
    "Prompt",
    "Reading",
    "Repeating",
    "half_turned",
    "read_prompt",
    "repeat_prompt",
]

TAIL = 64
"""Last queries whose attention is kept one by one."""

SINKS = 4
"""First queries that have no part in the moments, as kvpress leaves them out."""


@dataclass
class Notes:
    """What S queries gave to S keys in one layer, groups of query heads summed. float32.

    ``total``: [KH, S]; ``tail``: of the last queries, [KH, min(S, TAIL), S]; ``first``, ``second``: sums
    of the queries before rotation and of their outer products, [H, D] and [H, D, D], over ``moments``
    queries.
    """

    total: Tensor
    tail: Tensor
    first: Tensor
    second: Tensor
    moments: int = 0


@dataclass(frozen=True)
class Prompt:
    """A prompt up to some token: its KV and its notes by layer, and what repeating it gave to each key.

    ``most``, ``sums``: per layer the largest attention of a repeating query (of any head of the group), and
    the sum, [KH, S]. ``ahead``: by name, the sums of what tokens ahead give, see :mod:`.ahead`.
    """

    layers: list[KV]
    notes: list[Notes]
    model: LadderModel
    most: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    ahead: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """S."""
        return self.layers[0].keys.shape[1]


class Reading:
    """Appends to KV and notes."""

    following: int
    """The token that the model says next."""

    def __init__(self, model: LadderModel) -> None:
        self.model = model
        self._layers: dict[int, KV] = {}
        self._notes: dict[int, Notes] = {}

    def read(self, tokens: list[int]) -> Prompt:
        """Read on; returns the prompt so far, which further reading leaves as it is."""
        start = self._layers[0].keys.shape[1] if self._layers else 0
        self._rotation = self.model.rotation(start, start + len(tokens))
        logits = self.model.forward(self, torch.tensor([tokens]), start)
        self.following = int(logits[0, -1].argmax())
        order = sorted(self._layers)
        notes = [replace(self._notes[layer]) for layer in order]
        return Prompt([self._layers[layer] for layer in order], notes, self.model)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A stage's."""
        kv = appended(self._layers.get(layer), key[0], value[0])
        self._layers[layer] = kv
        self._note_queries(layer, query[0])
        start = kv.keys.shape[1] - key.shape[2]
        mixed = []
        for prob in causal_probabilities(query[0], kv.keys, start, scaling):
            mixed.append(mix(prob, kv.values, query.dtype))
            self._note(layer, prob.sum(1))
        return torch.cat(mixed, 1)[None]

    def _note(self, layer: int, rows: Tensor) -> None:
        """``rows``: [KH, t, end], of the next queries."""
        notes = self._notes[layer]
        end = rows.shape[2]
        grow = end - notes.total.shape[1]
        notes.total = torch.nn.functional.pad(notes.total, (0, grow)) + rows.sum(1)
        tail = torch.nn.functional.pad(notes.tail, (0, grow))
        notes.tail = torch.cat([tail, rows], 1)[:, -TAIL:]

    def _note_queries(self, layer: int, query: Tensor) -> None:
        """Undo the rotation of [H, T, D], and add up."""
        heads, _, size = query.shape
        if layer not in self._notes:
            keys = self._layers[layer].keys.shape[0]
            self._notes[layer] = Notes(
                torch.zeros(keys, 0), torch.zeros(keys, 0, 0), torch.zeros(heads, size),
                torch.zeros(heads, size, size),
            )  # fmt: skip
        notes = self._notes[layer]
        skip = SINKS if notes.moments == 0 else 0
        cos, sin = self._rotation
        plain = query.float() * cos - half_turned(query.float()) * sin
        plain = plain[:, skip:]
        notes.first = notes.first + plain.sum(1)
        notes.second = notes.second + plain.mT @ plain
        notes.moments += plain.shape[1]


class Repeating:
    """Reads behind a prompt, and notes what it attends to in the prompt: KVzip, arXiv 2505.23416."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.most: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A stage's."""
        kv = appended(self._prompt.layers[layer], key[0], value[0])
        length = self._prompt.tokens
        nothing = torch.zeros(kv.keys.shape[0], length)
        most, sums, mixed = nothing, nothing.clone(), []
        for prob in causal_probabilities(query[0], kv.keys, length, scaling):
            given = prob[..., :length]
            most = torch.maximum(most, given.amax((1, 2)))
            sums += given.sum((1, 2))
            mixed.append(mix(prob, kv.values, query.dtype))
        self.most[layer], self.sums[layer] = most, sums
        return torch.cat(mixed, 1)[None]


def read_prompt(model: LadderModel, parts: list[list[int]]) -> list[Prompt]:
    """The prompt after each part of it."""
    reading = Reading(model)
    return [reading.read(part) for part in parts]


def repeat_prompt(prompt: Prompt, tokens: list[int]) -> Prompt:
    """The prompt with what ``tokens`` (an instruction, and the prompt's text again) give to it."""
    stage = Repeating(prompt)
    prompt.model.forward(stage, torch.tensor([tokens]), prompt.tokens)
    order = range(len(prompt.layers))
    return replace(prompt, most=[stage.most[i] for i in order], sums=[stage.sums[i] for i in order])


def half_turned(rows: Tensor) -> Tensor:
    """What rotary positions call ``rotate_half``."""
    low, high = rows.chunk(2, -1)
    return torch.cat([-high, low], -1)
