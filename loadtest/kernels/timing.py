# SPDX-License-Identifier: Apache-2.0
"""Calls timed in turn: a slow moment of the machine hits all, and ratios are taken within a round."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from loadtest.common.statistics import percentile, quartiles

Call = Callable[[], object]
MOST = 200


def wall_seconds(call: Call) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rounds(
    calls: dict[str, Call],
    seconds: float,
    *,
    least: int = 3,
    timer: Callable[[Call], float] = wall_seconds,
) -> dict[str, list[float]]:
    """Seconds of all calls in turn until ``seconds`` are spent, in ``least`` to 200 rounds."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent, done = 0.0, 0
    while done < least or (done < MOST and spent < seconds):
        for name, call in calls.items():
            taken = timer(call)
            times[name].append(taken)
            # What takes no time at all still must end.
            spent += max(taken, 1e-4)
        done += 1
    return times


def ratio_row(times: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Seconds per call as a row of results: microseconds, and ratios to ``base`` of the same round."""
    ratios = [own / max(other, 1e-12) for own, other in zip(times, base, strict=True)]
    low, middle, high = quartiles(ratios)
    return {
        "median_us": round(percentile(times, 0.5) * 1e6, 2),
        "min_us": round(min(times) * 1e6, 2),
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
    }


def ratio_text(name: str, row: dict[str, Any]) -> str:
    """A :func:`ratio_row` in a line: the ratio, in brackets its quartiles."""
    low, high = row["ratio_quartiles"]
    return f"{name} {row['ratio']:.2f}x ({low:.2f}-{high:.2f})"
