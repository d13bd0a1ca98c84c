# SPDX-License-Identifier: Apache-2.0
"""What each rank says of tokens, one formula each from the papers, and how ranks are joined.

Plain torch, over the whole attention matrix of a layer; nothing is accumulated or rescored. Imports nothing
of h2o_vllm.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

from tests.reference.layer import Layer

WINDOW, KERNEL = 32, 7
"""SnapKV's."""

NEWER, FIRST = 2.0**-17, 4
"""KVzap's scores say nothing of where a token stands: by how much more, of its size, the next one counts, and
how many first tokens count twice as much as any attention."""

BEHIND = 2.0**-20
"""How much less, of its size, a score is to a token that has its rank in another way, for each way that comes
before."""


@dataclass(frozen=True)
class ReferenceScores:
    """One policy for one sequence.

    Attributes:
        policy: ranks joined by ``+``, in the table's order.
        protected: first tokens that are never ranked. prompt: its tokens.
        ranked: per eviction so far, this one last: tokens seen, and the positions that it ranked for the
            first time, from .. to.
    """

    policy: str
    protected: int
    prompt: int
    ranked: list[tuple[int, int, int]]

    def of(self, layer: Layer) -> Tensor:
        """[KH, S]: what the policy thinks of each token, the evicted ones included."""
        ways = self.policy.split("+")
        rows = layer.rows()
        if ways == ["attention"]:
            return rows.sum(1)
        # Whose attention is collected: from which query on.
        first_query = rows.shape[1]
        if "end" in ways:
            first_query = max(0, self.prompt - WINDOW)
        if {"attention", "mean", "value"} & {*ways}:
            first_query = 0
        scores = torch.zeros(rows.shape[0], rows.shape[2])
        for number, (when, start, end) in enumerate(self.ranked):
            if start == end:
                continue
            given = rows[:, :when, start:end]
            # Inside of a bounded prompt nothing is known of what its end will look at.
            known = [way for way in ways if way != "end" or when >= self.prompt]
            ranked = [self._first_scores(way, layer, number, given) for way in known]
            first = ranked[0]
            if len(ranked) > 1:
                first = self._by_the_best_rank(layer, number, *ranked)
            since = max(when, first_query)
            scores[:, start:end] = first + rows[:, since:, start:end].sum(1)
        return scores

    def _predicted(self, layer: Layer) -> Tensor:
        """What KVzap expects, [KH, S]."""
        calibration = layer.calibration
        pairs = torch.complex(*layer.keys.float().chunk(2, -1)).abs()
        known = torch.cat([pairs, layer.values.float()], 2).permute(1, 0, 2).flatten(1)
        predicted = (known @ calibration[:, :-1].T + calibration[:, -1]).T
        predicted.clamp_(max=0.0)
        predicted[:, :FIRST] = math.log(2.0)
        return (predicted + NEWER * torch.arange(predicted.shape[1])).exp()

    def _first_scores(self, way: str, layer: Layer, number: int, rows: Tensor) -> Tensor:
        """[KH, N]: of tokens at their first ranking, to which ``rows``, [KH, queries, N], attended."""
        when, start, end = self.ranked[number]
        if way in ("attention", "mean", "value"):
            given = rows.sum(1)
            if way != "attention":
                given = given / (when - torch.arange(start, end)) * when
            if way == "value":
                given = given * self._weights(layer)[:, start:end]
            return given
        if way == "predicted":
            return self._predicted(layer)[:, start:end].clone()
        if way == "key":
            return self._distinction(layer)[:, start:end]
        assert way == "end", way
        return self._late(number, rows)

    def _late(self, number: int, rows: Tensor) -> Tensor:
        """As :meth:`_first_scores`, by SnapKV."""
        _, start, end = self.ranked[number]
        sums = rows[:, max(0, self.prompt - WINDOW) :].sum(1)
        places = torch.arange(end - start)
        away = places - places[:, None]
        return sums[:, None].masked_fill(away.abs() > KERNEL // 2, -math.inf).amax(2)

    def _by_the_best_rank(
        self, layer: Layer, number: int, scores: Tensor, *others: Tensor
    ) -> Tensor:
        """[KH, N]: the score that stands at the best of each token's ranks, the ways in their order."""
        _, start, end = self.ranked[number]
        ordered = scores.sort(dim=1, descending=True).values
        ranks = torch.stack(
            [
                one.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
                for one in (scores, *others)
            ]
        )
        count = layer.keys.shape[1]
        known = layer.ranks if layer.ranks is not None else torch.zeros(len(scores), 0).long()
        layer.ranks = pad(known, (0, count - known.shape[1]))
        layer.ranks[:, start:end] = (number + 1) * count + ranks.amin(0)
        found = [ordered.gather(1, rank) * (1 - way * BEHIND) for way, rank in enumerate(ranks)]
        return torch.stack(found).amax(0)

    @property
    def _middle(self) -> slice:
        """What all tokens are compared with: those that the first eviction ranks. None is gone by then."""
        _, start, end = self.ranked[0]
        return slice(start, end)

    def _distinction(self, layer: Layer) -> Tensor:
        """How little each key is like the mean direction."""
        keys = normalize(layer.keys, dim=-1)
        return -cosine_similarity(keys, keys[:, self._middle].mean(1, keepdim=True), dim=-1)

    def _weights(self, layer: Layer) -> Tensor:
        """How far each value lies from the mean value, over the mean distance from it."""
        middle = layer.values[:, self._middle]
        distances = (layer.values - middle.mean(1, keepdim=True)).norm(dim=2)
        return distances / distances[:, self._middle].mean(1, keepdim=True)
