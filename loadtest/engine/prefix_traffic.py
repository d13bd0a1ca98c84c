# SPDX-License-Identifier: Apache-2.0
"""Traffic that shares its beginnings: a system prompt, the turns of a chat, many answers to one question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from loadtest.engine.workloads import SUITES, Setting

__all__ = [
    "SETTINGS",
    "TRAFFIC",
    "VARIANTS",
    "Traffic",
    "Variant",
    "engine_options",
    "serves",
]

SETTINGS = {"ample": Setting(2400), "short": Setting(2400, pool_tokens=3200)}
"""Memory. Each setting has its engines, which serve all traffic in turn."""

BUDGET = 0.2


@dataclass(frozen=True)
class Traffic:
    """Chats side by side; of each, a turn begins when the answer to the one before has ended.

    Attributes:
        shared: tokens that all chats begin with.
        own: tokens that each turn adds.
        output: tokens of an answer.
        n: answers to one turn.
        protect: ``kv_protect`` of our requests.
    """

    name: str
    what: str
    chats: int
    turns: int
    shared: int
    own: int
    output: int
    n: int
    protect: int | str

    def scaled(self, by: float) -> Traffic:
        """The same with shorter texts and fewer chats, to rehearse."""
        if by == 1:
            return self
        small: Callable[[int, int], int] = lambda value, least: max(least, round(value * by))  # noqa: E731
        shared = small(self.shared, 64) if self.shared else 0
        return replace(
            self,
            chats=min(self.chats, small(self.chats, 3)),
            turns=min(self.turns, small(self.turns, 2)),
            shared=shared,
            own=small(self.own, 32),
            output=small(self.output, 24),
            protect=shared if isinstance(self.protect, int) else self.protect,
        )

    @property
    def longest(self) -> int:
        """Tokens of a chat at its end."""
        return self.shared + self.turns * (self.own + self.output)


_ALL = (
    Traffic("system", "24 requests share a system prompt", 24, 1, 1500, 200, 256, 1, 1500),
    Traffic("chats", "8 chats of 6 turns", 8, 6, 300, 120, 160, 1, "prompt"),
    Traffic("n", "8 answers to one question", 1, 1, 0, 1000, 512, 8, "prompt"),
)
TRAFFIC = {traffic.name: traffic for traffic in _ALL}


@dataclass(frozen=True)
class Variant:
    """Who serves, and what its requests ask for.

    Attributes:
        engine: key of the CPU suite's variants.
        fields: of a request, given the traffic.
    """

    engine: str
    label: str
    fields: Callable[[Traffic], dict[str, Any] | None]


VARIANTS = {
    "stock": Variant("stock", "vLLM defaults", lambda _: None),
    "stock-same-flags": Variant("stock-same-flags", "vLLM, same flags", lambda _: None),
    "h2o-unprotected": Variant("h2o", "kv_budget alone", lambda _: {"kv_budget": BUDGET}),
    "keydiff": Variant(
        "h2o", "keydiff alone", lambda _: {"kv_budget": BUDGET, "kv_policy": "keydiff"}
    ),
    "h2o-system": Variant(
        "h2o", "system protected", lambda t: {"kv_budget": BUDGET, "kv_protect": t.shared}
    ),
    "h2o": Variant("h2o", "kv_protect", lambda t: {"kv_budget": BUDGET, "kv_protect": t.protect}),
}
"""The last is ours as it is meant. Without protection a request computes its whole prompt itself, unless its
policy needs no scores: then it reads what its first eviction frees."""


def serves(variant: str, traffic: Traffic) -> bool:
    """Whether a variant says anything else than the others about this traffic."""
    return variant != "h2o-system" or (traffic.shared > 0 and traffic.protect != traffic.shared)


def engine_options(setting: str, variant: str) -> dict[str, Any]:
    """Engine arguments: prefix caching is on, as it is by default."""
    options = SUITES["cpu"].engine_options(SETTINGS[setting], VARIANTS[variant].engine)
    return options | {"enable_prefix_caching": True}
