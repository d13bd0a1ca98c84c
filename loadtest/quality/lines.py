# SPDX-License-Identifier: Apache-2.0
"""Lines of the tables: a policy with what else a request says of it. Points: a line at a budget.

A line is written ``POLICY[,FIELD=VALUE...]``: ``h2o,delay=8`` is the policy ``h2o`` with ``kv_delay`` 8,
``value,heads=shared`` one with ``kv_heads`` "shared".
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h2o_vllm.config.settings import REQUEST_FIELDS

DEFAULT_LINES = ("h2o", "mean", "value", "snapkv", "key", "auto", "window", "random")
"""What is compared where no line is named: policies that need no calibration."""


@dataclass(frozen=True)
class Line:
    """A policy and what is asked of it besides a budget.

    Attributes:
        name: as written. policy: ``kv_policy``; empty: full KV. extras: other request fields, in order.
    """

    name: str
    policy: str
    extras: tuple[tuple[str, float | str], ...] = ()


@dataclass(frozen=True)
class Point:
    """One line at one budget."""

    line: Line
    budget: float

    @property
    def fields(self) -> dict[str, Any]:
        """The request fields.

        A line that names neither has no delay and protects nothing, whatever the server or the policy has as
        default: at one budget all lines hold as many tokens. ``random,protect=prompt`` is Random Attention as
        published.
        """
        if not self.line.policy:
            return {}
        asked = {"kv_policy": self.line.policy, "kv_budget": self.budget}
        return {**asked, "kv_delay": 0, "kv_protect": 0, **dict(self.line.extras)}


FULL = Point(Line("full", ""), 1.0)
"""What all others are compared with."""

AGAIN = Point(Line("full-again", ""), 1.0)
"""Full KV among the evicting requests: what differs from :data:`FULL` is not the eviction's doing."""


def parse_line(text: str, recent: float | None = None) -> Line:
    """A line as written; ``recent`` is added unless the line has its own.

    Raises:
        ValueError: a field cannot be read. Which policies exist is the engine's business.
    """
    policy, *rest = text.split(",")
    extras: dict[str, float | str] = {} if recent is None else {"kv_recent": recent}
    for extra in rest:
        name, _, value = extra.partition("=")
        if f"kv_{name}" not in REQUEST_FIELDS or not value:
            raise ValueError(
                f"--policies: {text!r}: got {extra!r}, wanted FIELD=VALUE such as delay=8, heads=shared, of "
                f"{', '.join(field.removeprefix('kv_') for field in REQUEST_FIELDS)}"
            )
        try:
            extras[f"kv_{name}"] = json.loads(value)
        except ValueError:
            extras[f"kv_{name}"] = value
    return Line(text, policy, tuple(extras.items()))


def points(lines: Sequence[Line], budgets: Sequence[float]) -> list[Point]:
    """Lines at budgets, budget by budget in the given order. At 1 every line is full KV: left out."""
    return [Point(line, budget) for budget in budgets for line in lines if budget < 1.0]
