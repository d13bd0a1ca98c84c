# SPDX-License-Identifier: Apache-2.0
"""Arrivals and ramps."""

from __future__ import annotations

import itertools
import statistics

import pytest

from loadtest.http.arrivals import Stages, StagesError, poisson


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = list(itertools.islice(poisson(5.0, "seed"), 5000))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0
    # Standard errors are 1.4 % of these means.
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.06)


def test_arrivals_depend_on_the_seed_alone() -> None:
    first, again, other = (list(itertools.islice(poisson(1.0, s), 5)) for s in ("a", "a", "b"))
    assert first == again != other


def test_stages_are_a_line_through_their_points() -> None:
    stages = Stages("10s:10,20s:10,0s:4,1m:4,10s:0")
    assert stages.seconds == 100
    got = [stages.users(now) for now in (0, 5, 10, 29.9, 30, 89, 90, 95, 99.99, 100)]
    assert got == [1, 5, 10, 10, 4, 4, 4, 2, 1, None]


@pytest.mark.parametrize("text", ["", "10:5", "10s", "10s:5,", "10s:-1", "1d:3"])
def test_what_are_no_stages_is_refused(text: str) -> None:
    with pytest.raises(StagesError, match="--stages"):
        Stages(text)
