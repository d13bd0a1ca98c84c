# SPDX-License-Identifier: Apache-2.0
"""Lines of the picture: a policy with what else a request says of it. Points: a line at a budget.

A line is written ``POLICY[+EXTRA...]``: ``h2o+sinks4`` is the policy ``h2o`` with ``kv_sinks`` 4,
``tova+recent0.2`` the policy ``tova`` with ``kv_recent`` 0.2, ``caote+shared`` one whose ``kv_heads`` are
"shared". Which ones exist is the server's business.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h2o_vllm.config.policies import REPEAT_POLICIES, ZAP_POLICIES

__all__ = ["AGAIN", "FULL", "Line", "Point", "default_lines", "parse_line", "points"]

_EXTRA = re.compile(r"([a-z_]+?)(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Line:
    """A policy and what is asked of it besides a budget.

    Attributes:
        name: as written. policy: ``kv_policy``. extras: other request fields, in order.
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
        """The request fields. A line without a delay has none, whatever the server's default is."""
        if self.line.policy == "full":
            return {"kv_policy": "full"}
        asked = {"kv_policy": self.line.policy, "kv_budget": self.budget, "kv_delay": 0}
        return {**asked, **dict(self.line.extras)}


FULL = Point(Line("full", "full"), 1.0)
"""What all others are compared with."""

AGAIN = Point(Line("full-again", "full"), 1.0)
"""Full KV among the evicting requests: what differs from :data:`FULL` is not the eviction's doing."""


def parse_line(text: str, policies: Sequence[str], recent: float | None = None) -> Line:
    """A line as written; ``recent`` is added unless the line has its own.

    Raises:
        ValueError: it is no policy, or an extra cannot be read.
    """
    policy, *rest = text.split("+")
    if policy not in policies:
        raise ValueError(
            f"--policies: {text!r}: got {policy!r}, wanted one of {', '.join(policies)}"
        )
    extras: dict[str, float | str] = {}
    if recent is not None and policy != "full":
        extras["kv_recent"] = recent
    for extra in rest:
        if extra == "shared":
            extras["kv_heads"] = extra
            continue
        match = _EXTRA.fullmatch(extra)
        if not match:
            raise ValueError(
                f"--policies: {text!r}: got {extra!r}, wanted such as sinks4, recent0.25, shared"
            )
        name, value = match.groups()
        extras[f"kv_{name}"] = float(value) if "." in value or name == "recent" else int(value)
    return Line(text, policy, tuple(extras.items()))


def default_lines(policies: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Every policy but full, which is always there; with protected first tokens where that can be asked.

    Those that repeat prompts, and want room behind each, have to be named; so those that want a calibration.
    """
    named = ("full", *REPEAT_POLICIES, *ZAP_POLICIES)
    lines = [policy for policy in policies if policy not in named]
    return [*lines, "h2o+sinks4"] if "kv_sinks" in fields and "h2o" in lines else lines


def points(lines: Sequence[Line], budgets: Sequence[float]) -> list[Point]:
    """Lines at budgets, budget by budget in the given order. At 1 every line is full KV: left out."""
    return [
        Point(line, budget)
        for budget in budgets
        for line in lines
        if budget < 1.0 and line.policy != "full"
    ]
