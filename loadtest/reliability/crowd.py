# SPDX-License-Identifier: Apache-2.0
"""The hunt's crowd: requests with budgets, policies, lengths and beginnings at random."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from loadtest.common.tiny_model import VOCABULARY

__all__ = ["CROWDS", "Ask", "Crowd", "make_asks"]

FAMILIES = 6
"""Prompts are beginnings of this many texts, so that many share their first blocks."""

BUDGETS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"kv_budget": 0.1},
    {"kv_budget": 0.2},
    {"kv_budget": 0.35, "kv_recent": 0.1},
    {"kv_budget": 0.5, "kv_recent": 1.0},
    {"kv_budget": 0.8},
    {"kv_budget": 1.0},
    {"kv_budget_tokens": 40},
    {"kv_budget_tokens": 100, "kv_recent": 0.0},
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 0.3, "kv_policy": "random"},
    {"kv_budget": 0.2, "kv_policy": "h2o-norm"},
    {"kv_budget": 0.2, "kv_policy": "caote"},
    {"kv_budget": 0.2, "kv_policy": "snapkv", "kv_sinks": 4},
    {"kv_budget": 0.3, "kv_policy": "tova"},
    {"kv_budget": 0.3, "kv_policy": "keydiff"},
)


@dataclass(frozen=True)
class Crowd:
    """How long requests are: ``prompt`` and ``output`` tokens at most."""

    prompt: int
    output: int


CROWDS = {"mixed": Crowd(200, 140), "growing": Crowd(64, 300)}


@dataclass(frozen=True)
class Ask:
    """One request of the hunt.

    Attributes:
        arrives: the step before which it is sent.
        leaves: the step, counted from its arrival, after which its client is gone; never if ``None``.
        priority: low comes first, and is preempted last.
    """

    prompt: tuple[int, ...]
    asked: dict[str, Any] | None
    max_tokens: int
    arrives: int
    leaves: int | None
    priority: int = 0


def make_asks(chance: random.Random, count: int, crowd: Crowd) -> list[Ask]:
    """``count`` requests, each about twice."""
    longest = crowd.prompt
    families = [[chance.randrange(VOCABULARY) for _ in range(longest)] for _ in range(FAMILIES)]
    different = []
    for _ in range(-(-count // 2)):
        family = chance.choice(families)
        length = round(chance.triangular(1, longest, longest // 4))
        own = [chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 0, 1, 20)))]
        different.append(
            Ask(
                prompt=tuple([*family[:length], *own][:longest]),
                asked=chance.choice(BUDGETS),
                max_tokens=round(chance.triangular(1, crowd.output, 3 * crowd.output / 7)),
                arrives=0,
                leaves=None,
            )
        )
    asks = different + different[: count - len(different)]
    chance.shuffle(asks)
    return [
        dataclasses.replace(
            ask,
            arrives=chance.randrange(20),
            leaves=chance.randrange(120) if chance.random() < 0.15 else None,
            priority=chance.randrange(3),
        )
        for ask in asks
    ]
