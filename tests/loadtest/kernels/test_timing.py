# SPDX-License-Identifier: Apache-2.0
"""How calls are timed, with a clock that is told what to say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.kernels.timing import ratio_row, rounds


def timer_of(seconds: dict[str, float]) -> Callable[[Callable[[], object]], float]:
    return lambda call: seconds[str(call())]


@pytest.mark.parametrize(
    ("seconds", "least", "expected"),
    [(0.0, 3, 3), (10.0, 3, 10), (9.5, 3, 10), (1e9, 3, 200), (0.0, 5, 5)],
)
def test_rounds_end_when_the_time_is_spent(seconds: float, least: int, expected: int) -> None:
    calls = {"stock": lambda: "stock", "ours": lambda: "ours"}
    timer = timer_of({"stock": 0.75, "ours": 0.25})
    times = rounds(calls, seconds, least=least, timer=timer)
    assert times == {"stock": [0.75] * expected, "ours": [0.25] * expected}


def test_every_call_is_made_once_before_it_is_timed() -> None:
    made: list[str] = []
    rounds({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 0, least=2)
    assert made == ["a", "b"] * 3


def test_ratio_is_that_of_each_round() -> None:
    got = ratio_row([1e-6, 4e-6, 9e-6], [1e-6, 2e-6, 3e-6])
    assert got == {
        "median_us": 4.0, "min_us": 1.0, "ratio": 2.0, "ratio_quartiles": [1.5, 2.5],
    }  # fmt: skip
