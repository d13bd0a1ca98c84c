# SPDX-License-Identifier: Apache-2.0
"""What a soak calls flat."""

import random

import pytest

from loadtest.reliability.soak import check_trends
from loadtest.reliability.trend import Bound, judge, slope

HOUR = [i / 1800 for i in range(1801)]
"""A sample every two seconds."""

MEMORY = Bound("rss", "MiB", per_hour=48, share=0.05)


def noise(level: float, spread: float, per_hour: float = 0.0) -> list[tuple[float, float]]:
    chance = random.Random(0)
    return [(x, chance.gauss(level + per_hour * x, spread)) for x in HOUR]


@pytest.mark.parametrize("per_hour", [-30.0, 0.0, 7.0, 500.0])
def test_slope_is_found_under_noise(per_hour: float) -> None:
    assert slope(noise(2000, 10, per_hour)) == pytest.approx(per_hour, abs=4)


def test_leak_is_no_trend_that_passes() -> None:
    assert judge(MEMORY, noise(2000, 10)).flat
    assert judge(MEMORY, noise(2000, 10, -500)).flat
    leak = judge(MEMORY, noise(2000, 10, 300))
    assert not leak.flat
    assert "GROWS" in str(leak)
    assert leak.row()["flat"] is False


def test_first_quarter_is_not_judged() -> None:
    rows = [
        {
            "t": t,
            "rss_mib": 3000 + min(0, t - 20) * 50,
            "fds": 90,
            "threads": 40,
            "latency_s": 0.5,
            "idle_blocks": 0.0,
        }
        for t in range(0, 120, 2)
    ]
    assert all(verdict.flat for verdict in check_trends(rows))
    leaking = [row | {"fds": 90 + row["t"]} for row in rows]
    assert [verdict.name for verdict in check_trends(leaking) if not verdict.flat] == ["fds"]
