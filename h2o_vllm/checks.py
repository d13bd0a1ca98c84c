# SPDX-License-Identifier: Apache-2.0
"""Checks of single values: each returns the value, or names the field, what it got and what is accepted.

Runs in every process; imports only :mod:`h2o_vllm.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from h2o_vllm.errors import BudgetError

MAX_TOKENS = 2**31 - 1
"""Largest number of tokens that any field takes."""


def check_fraction(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False
) -> float:
    """A number in [low, high], or (low, high] if ``low_open``.

    Raises:
        BudgetError: it is none. As all of these.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Comparing before converting: float(10**400) overflows. NaN is in no range.
    if not is_number or not low <= value <= high or (low_open and value == low):
        accepted = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
        raise BudgetError(name, value, accepted)
    return float(value)


def check_integer(name: str, value: Any, low: int = 1, high: int = MAX_TOKENS) -> int:
    """An integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BudgetError(name, value, f"an integer in [{low}, {high}]")
    return value


def check_flag(name: str, value: Any) -> bool:
    """``True`` or ``False``; 1 or 0 as well, which vLLM makes of them inside ``vllm_xargs``."""
    if not isinstance(value, int) or value not in (0, 1):
        raise BudgetError(name, value, "true or false")
    return bool(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise BudgetError(name, value, f"one of {', '.join(choices)}")
    return value
