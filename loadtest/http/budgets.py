# SPDX-License-Identifier: Apache-2.0
"""Which KV budget each request of a load test asks for. Pure; imports nothing of ours.

A mix is written ``BUDGET[+elastic][/POLICY][:WEIGHT],...``. ``0.2`` is ``kv_budget``, ``512t`` is
``kv_budget_tokens``, ``+elastic`` asks for all KV until memory is short (``kv_elastic``), ``none`` sends no
field at all (the server's default; the only one plain vLLM understands)::

    0.2                    every request keeps a fifth
    1.0:1,0.2:3            one request in four keeps everything
    0.2+elastic            everything while the pool suffices, then a fifth
    0.2/h2o,0.2/window     two policies side by side
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ENTRY = re.compile(
    r"(?P<budget>none|(?P<tokens>\d+)t|(?P<share>\d*\.?\d+))(?P<elastic>\+elastic)?(?:/(?P<policy>[a-z0-9_+-]+))?"
    r"(?::(?P<weight>\d+))?"
)


class MixError(ValueError):
    """A mix of budgets that cannot be read."""


@dataclass(frozen=True)
class Budget:
    """What one kind of request asks for.

    Attributes:
        label: how its rows are called, ``kv=0.2``.
        fields: what its request body carries.
        weight: its share of the requests, relative to the others'.
    """

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    weight: int = 1


class Mix:
    """Deals budgets to requests by number: exact shares in every full cycle, spread evenly.

    Raises:
        MixError: ``text`` is no mix.
    """

    def __init__(self, text: str) -> None:
        self.budgets = tuple(_budget(entry.strip()) for entry in text.split(","))
        labels = [budget.label for budget in self.budgets]
        if len(set(labels)) < len(labels):
            raise MixError(f"--budgets: {text!r} names a budget twice; give it a larger weight")
        self._cycle = _spread(self.budgets)

    def __getitem__(self, number: int) -> Budget:
        """The budget of request ``number``."""
        return self._cycle[number % len(self._cycle)]


def _budget(entry: str) -> Budget:
    found = _ENTRY.fullmatch(entry)
    if found is None or found["weight"] == "0" or (found["elastic"] and found["budget"] == "none"):
        raise MixError(
            f"--budgets: got {entry!r}, wanted SHARE, TOKENSt or none, then optionally +elastic, /POLICY "
            "and :WEIGHT (an integer from 1), as in 1.0:1,0.2:3"
        )
    fields: dict[str, Any] = {}
    if found["tokens"]:
        fields["kv_budget_tokens"] = int(found["tokens"])
    elif found["share"]:
        fields["kv_budget"] = float(found["share"])
    if found["elastic"]:
        fields["kv_elastic"] = True
    if found["policy"]:
        fields["kv_policy"] = found["policy"]
    shown = f"{fields['kv_budget']:g}" if "kv_budget" in fields else found["budget"]
    policy = f"/{found['policy']}" if found["policy"] else ""
    label = f"kv={shown}{found['elastic'] or ''}{policy}"
    return Budget(label, fields, int(found["weight"] or 1))


def _spread(budgets: tuple[Budget, ...]) -> tuple[Budget, ...]:
    """One cycle of smooth weighted round robin (as nginx picks upstream servers)."""
    total = sum(budget.weight for budget in budgets)
    credit = dict.fromkeys(range(len(budgets)), 0)
    cycle = []
    for _ in range(total):
        for at, budget in enumerate(budgets):
            credit[at] += budget.weight
        chosen = max(credit, key=lambda at: credit[at])
        credit[chosen] -= total
        cycle.append(budgets[chosen])
    return tuple(cycle)
