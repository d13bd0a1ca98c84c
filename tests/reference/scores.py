# SPDX-License-Identifier: Apache-2.0
"""What each policy that keeps single tokens thinks of them: one formula each, from the papers.

Plain torch, over the whole attention matrix of a layer; nothing is accumulated or rescored. Imports nothing
of h2o_vllm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

from tests.reference.layer import Layer

__all__ = ["ReferenceScores"]

WINDOW, KERNEL = 32, 7
"""SnapKV's."""

NEWER, FIRST = 2.0**-17, 4
"""KVzap's scores say nothing of where a token stands: by how much more, of its size, the next one counts, and
how many first tokens count twice as much as any attention."""

NEARER, BEHIND = 2.0**-18, 2.0**-20
"""How much less, of its size, a score is to a token's neighbours, for each that comes before; and to a token
that has its rank in another way, for each way that comes before."""


@dataclass(frozen=True)
class ReferenceScores:
    """One policy's formula for one sequence.

    Attributes:
        policy: value of ``kv_policy``. sinks: first tokens that stay. protected: first tokens that are never
            ranked. prompt: its tokens.
        ranked: per eviction so far, this one last: tokens seen, and the positions that it ranked for the
            first time, from .. to.
    """

    policy: str
    sinks: int
    protected: int
    prompt: int
    ranked: list[tuple[int, int, int]]

    def of(self, layer: Layer) -> Tensor:
        """[KH, S]: what the policy thinks of each token, the evicted ones included."""
        if self.policy == "keydiff":
            return self._distinction(layer)
        if self.policy in ("zap", "zap-keydiff"):
            return self._zap_scores(layer)
        rows = layer.rows()
        if self.policy == "h2o":
            return rows.sum(1)
        if self.policy == "tova":
            return rows[:, -1]
        ways = self.policy.split("-")
        if "caote" in ways:
            layer.weights.append(self._weights(layer))
        if "keydiff" in ways:
            layer.distinctions.append(self._distinction(layer))
        scores = torch.zeros(rows.shape[0], rows.shape[2])
        for number, (when, start, end) in enumerate(self.ranked):
            if start == end:
                continue
            given = rows[:, :when, start:end]
            first = self._first_scores(ways[0], layer, number, given)
            if "keydiff" in ways:
                others = [
                    self._first_scores(way, layer, number, given)
                    for way in ways[1:]
                    # Inside of a bounded prompt nobody knows what its end will look at.
                    if way != "snapkv" or when >= self.prompt
                ]
                first = self._by_the_best_rank(layer, number, first, *others)
            since = when
            if self.policy == "zap-snapkv-keydiff":
                since = max(when, self.prompt - WINDOW)
            scores[:, start:end] = first + rows[:, since:, start:end].sum(1)
        return scores

    def _zap_scores(self, layer: Layer) -> Tensor:
        """KVzap's, [KH, S], by a calibration of pairs' lengths and of values, all heads' together."""
        foretold = self._foretold(layer)
        layer.distinctions.append(self._distinction(layer))
        scores = torch.zeros_like(foretold)
        for number, (_, start, end) in enumerate(self.ranked):
            if start == end:
                continue
            first = foretold[:, start:end].clone()
            if self.policy == "zap-keydiff":
                distinctions = layer.distinctions[number][:, start:end]
                first = self._by_the_best_rank(layer, number, first, distinctions)
            scores[:, start:end] = first
        return scores

    def _foretold(self, layer: Layer) -> Tensor:
        """What KVzap expects, [KH, S]."""
        calibration = layer.calibration
        assert calibration is not None
        pairs = torch.complex(*layer.keys.float().chunk(2, -1)).abs()
        known = torch.cat([pairs, layer.values.float()], 2).permute(1, 0, 2).flatten(1)
        foretold = (known @ calibration[:, :-1].T + calibration[:, -1]).T
        foretold.clamp_(max=0.0)
        foretold[:, :FIRST] = math.log(2.0)
        return (foretold + NEWER * torch.arange(foretold.shape[1])).exp()

    def _first_scores(self, way: str, layer: Layer, number: int, rows: Tensor) -> Tensor:
        """[KH, N]: of tokens at their first ranking, to which ``rows``, [KH, queries, N], attended."""
        when, start, end = self.ranked[number]
        # Protected tokens have no score that neighbours could share, nor a rank.
        sinks = max(0, self.sinks - start)
        if way in ("h2o", "caote"):  # h2o-norm
            mean = rows.sum(1) / (when - torch.arange(start, end))
            if way == "caote":
                mean *= layer.weights[number][:, start:end]
            mean[:, :sinks] = 0.0
            return mean * when
        if way == "zap":
            return self._foretold(layer)[:, start:end].clone()
        if way == "keydiff":
            return layer.distinctions[number][:, start:end]
        assert way == "snapkv", way
        return self._late(number, rows)

    def _late(self, number: int, rows: Tensor) -> Tensor:
        """As :meth:`_first_scores`, by SnapKV."""
        _, start, end = self.ranked[number]
        sums = rows[:, max(0, self.prompt - WINDOW) :].sum(1)
        sums[:, : max(0, self.sinks - start)] = 0.0
        # Of those around one hit, itself counts first, then the token behind it, the one before it, ...
        places = torch.arange(end - start)
        away = places - places[:, None]
        less = 1 - (2 * away.abs() - (away < 0).int()) * NEARER
        around = (sums[:, None] * less).masked_fill(away.abs() > KERNEL // 2, -math.inf)
        return around.amax(2)

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

    def _distinction(self, layer: Layer) -> Tensor:
        """How little each key is like the mean of those that are ranked now."""
        keys = normalize(layer.keys, dim=-1)
        ranks = slice(self.protected, self.ranked[-1][2])
        ranked = layer.alive[:, ranks, None]
        anchor = (keys[:, ranks] * ranked).sum(1, keepdim=True) / ranked.sum(1, keepdim=True)
        return -cosine_similarity(keys, anchor, dim=-1)

    def _weights(self, layer: Layer) -> Tensor:
        """How far each value lies from the mean of those that are ranked now, over their mean distance."""
        until = self.ranked[-1][2]
        ranked, values = layer.alive[:, :until].float(), layer.values[:, :until]
        ranked[:, : self.protected] = 0.0
        count = ranked.sum(1, keepdim=True)
        centre = torch.einsum("ks,ksd->kd", ranked, values) / count
        distances = torch.linalg.vector_norm(values - centre[:, None], dim=2)
        return distances / ((distances * ranked).sum(1, keepdim=True) / count)
