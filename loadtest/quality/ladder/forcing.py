# SPDX-License-Identifier: Apache-2.0
"""Rows that evict while they read on, each by its own rung: the engine's cadence, without its blocks.

Whole blocks of tokens go, before the token that would exceed the budget by a block, and the recent window
begins at the nearest block. Scores go on as the engine's policies say (``reference/scores.py``): a token's
score at its first ranking, and the attention it gets after that. ``repeat`` takes the largest attention that
a later query gives, too; ``zap`` stays what it was. Presses of kvpress cut the prompt once, and what follows
stays, as kvpress has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

from h2o_vllm.calibration.regression import foretold
from loadtest.quality.ladder.attention import KV, appended, row_mix, row_probabilities
from loadtest.quality.ladder.gate import features
from loadtest.quality.ladder.keep import FULL, Rung, keep, select
from loadtest.quality.ladder.reading import Prompt
from loadtest.quality.ladder.scores import (
    GATED,
    LOOKING,
    MIXED,
    WINDOW,
    mixed,
    plain_scores,
    pooled,
    shares_of,
    window_scores,
)

__all__ = ["Forcing"]

ELEMENTS = 1 << 24
"""Attention logits at a time: 64 MiB in float32."""

WEIGHED = ("h2o-norm", "caote", "snapkv", *LOOKING, "gate", "gate-caote")
"""Scores that weigh what a token had received when it was ranked first."""


class Forcing:
    """R rows behind one prompt.

    Args:
        prompt: what was read. rungs: one per row. budget: share of the tokens seen that is kept.
        block: tokens evicted at a time.
    """

    def __init__(self, prompt: Prompt, rungs: Sequence[Rung], budget: float, block: int) -> None:
        layers, heads, rows = len(prompt.layers), prompt.layers[0].keys.shape[0], len(rungs)
        self.own: dict[int, KV] = {}
        """What rows have read on, [R, KH, N, D]."""
        everyone = torch.ones(rows, heads, prompt.tokens, dtype=torch.bool)
        self.alive = [everyone.clone() for _ in range(layers)]
        """Per layer, [R, KH, S + N]."""
        self._prompt, self._rungs, self._budget, self._block = prompt, rungs, budget, block
        # What every key has received after the prompt in all, since it was ranked first, at most, and
        # from the last query: [R, KH, S + N] each. Sums begin at zero, so that ties stay ties.
        nothing = torch.zeros(rows, heads, prompt.tokens)
        self._later = [nothing.clone() for _ in range(layers)]
        self._after = [nothing.clone() for _ in range(layers)]
        self._most = [nothing.clone() for _ in range(layers)]
        self._last = [one.tail[:, -1].expand(rows, -1, -1).clone() for one in prompt.notes]
        # A weighed score at the first ranking.
        used = {plane for rung in rungs for plane in rung.planes if not rung.presses}
        self._weighed = {
            name: [nothing.clone() for _ in range(layers)]
            for name in used if name in WEIGHED or MIXED in name
        }  # fmt: skip
        self._ranked = [0] * rows
        self._evicted = [0] * rows

    @property
    def seen(self) -> int:
        """Tokens whose KV has been computed."""
        return self._later[0].shape[2]

    def held(self, row: int) -> int:
        """Tokens whose KV a row still has, per head on average."""
        return self.seen - self._evicted[row]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A stage's."""
        own = appended(self.own.get(layer), key, value)
        self.own[layer] = own
        shared = self._prompt.layers[layer]
        self._grow(layer, key.shape[2])
        step = max(1, ELEMENTS // (query.shape[1] * query.shape[2] * self._later[layer].shape[2]))
        grouped = query.unflatten(1, (key.shape[1], -1)).float() * scaling
        keys, values = shared.keys.float(), shared.values.float()
        mixed = []
        for at in range(0, query.shape[0], step):
            some = slice(at, at + step)
            alive = self.alive[layer][some]
            prob = row_probabilities(grouped[some], keys, alive, own.keys[some].float())
            self._note(layer, some, prob)
            mixed.append(row_mix(prob, values, own.values[some].float()))
        return torch.cat(mixed).flatten(1, 2).to(query.dtype)

    def _grow(self, layer: int, more: int) -> None:
        for notes in (self._later, self._after, self._most, self._last, *self._weighed.values()):
            notes[layer] = pad(notes[layer], (0, more))
        self.alive[layer] = pad(self.alive[layer], (0, more), value=True)

    def _note(self, layer: int, rows: slice, prob: Tensor) -> None:
        """Add up some rows' attention, [R, KH, G, T, S + N]."""
        given = prob.sum(2)
        self._later[layer][rows] += given.sum(2)
        self._after[layer][rows] += given.sum(2)
        self._most[layer][rows] = torch.maximum(self._most[layer][rows], prob.amax((2, 3)))
        self._last[layer][rows] = given[:, :, -1]

    def room(self, most: int) -> int:
        """Tokens, at most so many, that can be read before some row has to evict."""
        evicting = [
            row for row, rung in enumerate(self._rungs) if rung != FULL and not rung.presses
        ]
        return next(
            (n for n in range(1, most) if any(self._excess(row, n) > 0 for row in evicting)), most
        )

    @torch.inference_mode()
    def evict(self) -> None:
        """Whatever is due."""
        for row, rung in enumerate(self._rungs):
            if rung.presses:
                self._press(row, rung)
            elif rung != FULL and (excess := self._excess(row, 0)) > 0:
                self._evict(row, rung, excess)

    def _press(self, row: int, rung: Rung) -> None:
        if self._evicted[row]:
            return
        chosen = keep(rung, self._prompt, self._budget)
        for layer, mask in enumerate(chosen):
            self.alive[layer][row, :, : self._prompt.tokens] = mask
        self._evicted[row] = self._prompt.tokens - self._tokens(self._prompt.tokens)

    def _tokens(self, seen: int) -> int:
        return math.ceil(round(self._budget * seen, 6))

    def _excess(self, row: int, more: int) -> int:
        """Tokens to evict once ``more`` have been read."""
        over = self.held(row) + more - self._tokens(self.seen + more)
        return over // self._block * self._block

    def _evict(self, row: int, rung: Rung, excess: int) -> None:
        exact = self.seen - round(rung.recent * self._tokens(self.seen))
        until = min((exact + self._block // 2) // self._block, self.seen // self._block)
        until = max(until * self._block, self._evicted[row] + excess)
        alive = torch.stack([alive[row, :, :until] for alive in self.alive])
        planes = [
            self._plane(name, row, until).masked_fill(~alive, float("-inf")) for name in rung.planes
        ]
        self._ranked[row] = max(self._ranked[row], until)
        ahead = 0 if self._evicted[row] else excess
        chosen = select(planes, until - self._evicted[row] - excess, rung.heads, ahead)
        for layer, mask in enumerate(chosen):
            self.alive[layer][row, :, :until] = mask
        self._evicted[row] += excess

    def _plane(self, name: str, row: int, until: int) -> Tensor:
        """[L, KH, until]."""
        if name in ("random", "window"):
            heads = self._later[0].shape[1]
            shape = (len(self._prompt.layers), heads, until)
            if name == "window":
                return window_scores(until).expand(shape)
            return torch.rand(shape, generator=torch.Generator().manual_seed(0))
        return torch.stack(
            [self._scores(name, layer, row, until) for layer in range(len(self._prompt.layers))]
        )

    def _scores(self, name: str, layer: int, row: int, until: int) -> Tensor:
        """Of a layer's tokens, [KH, until]."""
        later = self._later[layer][row, :, :until]
        if name in ("h2o", "repeat-sum"):
            prompt = self._prompt
            begun = prompt.notes[layer].total if name == "h2o" else prompt.sums[layer]
            return _fitted(begun, until) + later
        if name == "tova":
            return self._last[layer][row, :, :until]
        if name == "keydiff":
            keys = normalize(self._all(layer, row, "keys", until), dim=-1)
            centre = _mean(keys, self.alive[layer][row, :, :until])
            return -cosine_similarity(keys, centre, dim=-1)
        if name == "repeat":
            most = self._most[layer][row, :, :until]
            return torch.maximum(_fitted(self._prompt.most[layer], until), most)
        if name == "zap":
            return self._foretold(layer, row, until)
        self._weigh(name, layer, row, until)
        ways = plain_scores(name)
        # Policies that foretell collect attention only if they want that of late queries.
        goes_on = ways[0] != "zap" or "snapkv" in ways
        return (
            self._weighed[name][layer][row, :, :until]
            + goes_on * self._after[layer][row, :, :until]
        )

    def _foretold(self, layer: int, row: int, until: int) -> Tensor:
        zap = self._prompt.model.zap
        assert zap is not None
        kv = [self._all(layer, row, what, until) for what in ("keys", "values")]
        return zap.scores(layer, *kv)

    def _weigh(self, name: str, layer: int, row: int, until: int) -> None:
        """Rank tokens that never were."""
        fresh = slice(self._ranked[row], until)
        if fresh.start >= until:
            return
        weighed = [self._first_scores(one, layer, row, fresh) for one in plain_scores(name)]
        self._weighed[name][layer][row, :, fresh] = mixed(*weighed, shares=shares_of(name))
        self._after[layer][row, :, fresh] = 0

    def _first_scores(self, name: str, layer: int, row: int, fresh: slice) -> Tensor:
        """Of tokens that never were ranked, [KH, fresh]."""
        until = fresh.stop
        if name not in WEIGHED:
            return self._scores(name, layer, row, until)[:, fresh]
        later, notes = self._later[layer][row, :, :until], self._prompt.notes[layer]
        begun = {one: by[layer] for one, by in self._prompt.ahead.items()}
        begun["snapkv"] = notes.tail[:, -WINDOW:].sum(1)
        if name in begun:
            return pooled((_fitted(begun[name], until) + later)[:, fresh])
        weighed = (_fitted(notes.total, until) + later)[:, fresh]
        weighed = weighed / (self.seen - torch.arange(fresh.start, until))
        if name in GATED:
            weighed = self._expected(layer, row, fresh, weighed)
        weighed = weighed * self.seen
        if name.endswith("caote"):
            values = self._all(layer, row, "values", until)
            alive = self.alive[layer][row, :, :until]
            far = (values - _mean(values, alive)).norm(dim=2, keepdim=True)
            weighed = weighed * (far / _mean(far, alive))[:, fresh, 0]
        return weighed

    def _expected(self, layer: int, row: int, fresh: slice, per_query: Tensor) -> Tensor:
        """What a gate expects of tokens that have had so much."""
        model = self._prompt.model
        assert model.gate is not None
        kv = [self._all(layer, row, what, fresh.stop)[:, fresh] for what in ("keys", "values")]
        known = features(model, kv[0], kv[1], per_query, fresh.start, self.seen)
        return foretold(model.gate[layer], known)

    def _all(self, layer: int, row: int, what: str, until: int) -> Tensor:
        """A row's keys or values, [KH, until, D], float32."""
        shared = getattr(self._prompt.layers[layer], what)
        own = [getattr(self.own[layer], what)[row]] if layer in self.own else []
        return torch.cat([shared, *own], 1)[:, :until].float()


def _fitted(scores: Tensor, until: int) -> Tensor:
    """[KH, until]: zero for what came after the prompt."""
    return pad(scores[:, :until], (0, max(0, until - scores.shape[1])))


def _mean(rows: Tensor, alive: Tensor) -> Tensor:
    """Of [KH, U, D] over those alive, [KH, 1, D]."""
    share = alive[..., None].float()
    return (rows * share).sum(1, keepdim=True) / share.sum(1, keepdim=True)
