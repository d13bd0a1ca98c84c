# SPDX-License-Identifier: Apache-2.0
"""Which tokens a rung of the ladder keeps: scores, who shares slots with whom, and the newest tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from loadtest.quality.ladder.reading import Prompt
from loadtest.quality.ladder.scores import (
    GATED,
    LOOKING,
    PRESSES,
    REPEATING,
    SCORES,
    ZAPPED,
    plain_scores,
    scores_of,
)

__all__ = ["Heads", "Rung", "keep", "parse_rung", "select"]

Heads = Literal["uniform", "layer", "global"]
"""Who shares slots: nobody, so that all heads hold as many; the heads of a layer; all heads."""


@dataclass(frozen=True)
class Rung:
    """One way to choose.

    Attributes:
        planes: the scores; of several a token's best rank counts, so that each has its share of the slots.
        heads: who shares slots.
        recent: share of the budget that the newest tokens have.
    """

    planes: tuple[str, ...]
    heads: Heads = "uniform"
    recent: float = 0.5

    @property
    def name(self) -> str:
        """As it is written, see :func:`parse_rung`; what is usual is left out."""
        usual = 0.0 if self.planes[0] in PRESSES else 0.5
        heads = "" if self.heads == "uniform" else f":{self.heads}"
        return "+".join(self.planes) + heads + (f":{self.recent:g}" if self.recent != usual else "")

    def __repr__(self) -> str:
        return self.name

    @property
    def presses(self) -> bool:
        """Whether it is one of kvpress'."""
        return not PRESSES.keys().isdisjoint(self.scores)

    @property
    def repeats(self) -> bool:
        """Whether the prompt has to be repeated."""
        return not REPEATING.isdisjoint(self.scores)

    @property
    def looks(self) -> frozenset[str]:
        """What looks ahead of the prompt."""
        return LOOKING.intersection(self.scores)

    @property
    def gated(self) -> bool:
        """Whether a gate has to be trained."""
        return not GATED.isdisjoint(self.scores)

    @property
    def zaps(self) -> bool:
        """Whether the model has to be calibrated."""
        return not ZAPPED.isdisjoint(self.scores)

    @property
    def scores(self) -> list[str]:
        """All that its planes are made of."""
        return [score for plane in self.planes for score in plain_scores(plane)]


FULL = Rung(("full",))
"""Everything."""


def parse_rung(text: str) -> Rung:
    """``SCORE[+SCORE...][:layer|:global][:RECENT]``; presses of kvpress have no recent tokens.

    In place of a score: ``SCORE/SCORE[*N][/SCORE...]``, several that become one when a token is ranked first;
    ranks of those with a number count so many times, so that they have a smaller share of the slots.

    Raises:
        ValueError: it cannot be read.
    """
    first, *extras = text.split(":")
    planes = tuple(first.split("+"))
    known = {**SCORES, **PRESSES, "random": None}
    rung = Rung(planes, recent=0.0 if planes[0] in PRESSES else 0.5)
    unknown = [score for score in rung.scores if score not in known]
    if unknown:
        raise ValueError(f"rung {text!r}: got {unknown[0]!r}, wanted one of {', '.join(known)}")
    for extra in extras:
        if extra in get_args(Heads):
            rung = Rung(planes, cast(Heads, extra), rung.recent)
        else:
            try:
                recent = float(extra)
            except ValueError:
                recent = math.nan
            if not 0 <= recent <= 1:
                raise ValueError(
                    f"rung {text!r}: got {extra!r}, wanted layer, global or a recent share in [0, 1]"
                )
            rung = Rung(planes, rung.heads, recent)
    return rung


def keep(rung: Rung, prompt: Prompt, budget: float, seed: int = 0) -> Tensor:
    """Who is kept of a prompt's S tokens, [L, KH, S]: ``ceil(budget * S)`` per head on average."""
    seen = prompt.tokens
    if rung == FULL:
        return torch.ones(len(prompt.layers), len(prompt.layers[0].keys), seen, dtype=torch.bool)
    tokens = math.ceil(round(budget * seen, 6))
    recent = round(rung.recent * tokens)
    until = seen - recent
    planes = [scores_of(plane, prompt, until, seed) for plane in rung.planes]
    chosen = select(planes, tokens - recent, rung.heads, seen - tokens)
    return torch.nn.functional.pad(chosen, (0, recent), value=True)


def select(planes: list[Tensor], heavy: int, heads: Heads, ahead: int = 0) -> Tensor:
    """The best tokens of [L, KH, U] scores, a boolean mask: ``heavy`` per head, on average where shared.

    Of several planes, tokens are taken in the order of their best rank in any, at one rank in the order of
    the planes. Of equal tokens the first is taken, counted from position ``ahead``: at its first eviction the
    engine need not move those behind it.
    """
    layers, count, _ = planes[0].shape
    planes = [plane.roll(-ahead, -1) for plane in planes]
    shapes = {"uniform": (layers * count, -1), "layer": (layers, -1), "global": (1, -1)}
    shared = {"uniform": 1, "layer": count, "global": layers * count}[heads]
    grouped = [plane.reshape(shapes[heads]) for plane in planes]
    order = grouped[0]
    if len(planes) > 1:
        places = [_ranks(g) * len(planes) + way for way, g in enumerate(grouped)]
        order = -torch.stack(places).amin(0)
    best = order.sort(dim=-1, descending=True, stable=True).indices[:, : heavy * shared]
    mask = torch.zeros_like(grouped[0], dtype=torch.bool).scatter_(1, best, True)
    return mask.view_as(planes[0]).roll(ahead, -1)


def _ranks(scores: Tensor) -> Tensor:
    """0 for the best of each row."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[1], dtype=torch.float32).expand_as(scores)
    return torch.empty_like(places).scatter_(1, order, places)
