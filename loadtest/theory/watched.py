# SPDX-License-Identifier: Apache-2.0
"""A text's attention under full KV, and what H2O keeps of it token by token.

Scores are those of ``tests.reference.h2o``: attention probabilities, summed over queries and over
the G query heads of a KV head. The paper has one head; everything here is per layer and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.reference.h2o import Reference

__all__ = ["Attention", "Eviction", "Plan", "Watched"]


@dataclass(frozen=True)
class Attention:
    """What T prompt tokens and N further ones attend to with full KV; S = T + N. float32.

    Attributes:
        prompt: what the prompt's queries gave to its keys, [L, KH, T].
        given: what each further query gives, per layer [KH, N, S].
        queries: further tokens whose attention is known by query head, [Q], counted from the prompt's end.
        probabilities: theirs, per layer [Q, KH, G, S].
        values: per layer [KH, S, D].
    """

    prompt: Tensor
    given: list[Tensor]
    queries: Tensor
    probabilities: list[Tensor]
    values: list[Tensor]

    def totals(self, layer: int) -> Tensor:
        """Scores after the prompt and after each further token, [KH, N + 1, S], float64."""
        given = self.given[layer].double()
        missing = given.shape[2] - self.prompt.shape[2]
        first = pad(self.prompt[layer].double(), (0, missing))[:, None]
        return torch.cat([first, given], 1).cumsum(1)

    @property
    def seen(self) -> Tensor:
        """Tokens there are at each of those steps, [N + 1]."""
        tokens = self.prompt.shape[2]
        return torch.arange(tokens, tokens + self.given[0].shape[1] + 1)


class Plan(NamedTuple):
    """What is kept: ``budget`` tokens, k, of which ``recent`` are the newest."""

    budget: int
    recent: int


@dataclass(frozen=True)
class Eviction:
    """What H2O keeps by a plan.

    Attributes:
        kept: after the prompt and after each further token, [N + 1, L, KH, S].
        scores: at the end, as the cut cache has them, [L, KH, S].
    """

    plan: Plan
    kept: Tensor
    scores: Tensor


@dataclass
class Watched(Reference):
    """H2O as the paper's Algorithm 2 has it: k is fixed, and one token goes for each that comes.

    Algorithm 2 has no recent tokens; the paper's section 5 and we keep half of k for them.
    """

    _asked: Tensor | None = None
    _given: dict[int, Tensor] = field(default_factory=dict)
    _probabilities: dict[int, Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def watch(self, prompt: Tensor, forced: Tensor, queries: Tensor) -> Attention:
        """Reads a prompt and what follows, [1, T] and [1, N], with full KV.

        Leaves the model as it is after the prompt. ``queries``: see :class:`Attention`.
        """
        self.read(prompt, chunk=128)
        before = self.snapshot()
        first = torch.stack([cache.scores[0] for _, cache in sorted(before.items())])
        self._asked = queries
        self._forward(forced)
        self._asked = None
        layers = sorted(before)
        values = [self.layers[layer].values[0] for layer in layers]
        given = [self._given.pop(layer) for layer in layers]
        probabilities = [self._probabilities.pop(layer) for layer in layers]
        self.layers = before
        return Attention(first, given, queries, probabilities, values)

    @torch.inference_mode()
    def evict_along(self, forced: Tensor, plans: list[Plan]) -> list[Eviction]:
        """Reads tokens, [1, N], behind the prompt, once for every plan; all plans are one batch.

        Leaves the model as it was.
        """
        before = self.snapshot()
        for cache in self.layers.values():
            for name in ("keys", "values", "alive", "scores"):
                setattr(cache, name, getattr(cache, name).repeat_interleave(len(plans), 0))
        steps = []
        for token in forced.expand(len(plans), -1).split(1, 1):
            self._cut(plans)
            steps.append(self._alive())
            self._forward(token)
        self._cut(plans)
        steps.append(self._alive())
        kept = torch.stack([pad(one, (0, self.seen - one.shape[-1])) for one in steps])
        scores = torch.stack([cache.scores for _, cache in sorted(self.layers.items())])
        self.layers = before
        return [Eviction(plan, kept[:, :, row], scores[:, row]) for row, plan in enumerate(plans)]

    def _alive(self) -> Tensor:
        """Who is kept now, [L, B, KH, S]."""
        return torch.stack([cache.alive.clone() for _, cache in sorted(self.layers.items())])

    def _cut(self, plans: list[Plan]) -> None:
        """The lowest of those that are not recent go until every row has its budget."""
        for row, plan in enumerate(plans):
            excess = int(self.layers[0].alive[row, 0].sum()) - plan.budget
            for cache in self.layers.values():
                older = cache.alive[row].clone()
                older[:, self.seen - plan.recent :] = False
                scores = cache.scores[row].masked_fill(~older, torch.inf)
                lowest = scores.sort(dim=-1, stable=True).indices[:, : max(0, excess)]
                cache.alive[row].scatter_(-1, lowest, False)

    def _note(self, layer: int, prob: Tensor) -> None:
        if self._asked is not None:
            self._given[layer] = prob[0].sum(1)
            self._probabilities[layer] = prob[0][:, :, self._asked].movedim(2, 0).clone()
        super()._note(layer, prob)
