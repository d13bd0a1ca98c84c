# SPDX-License-Identifier: Apache-2.0
"""Arrivals of an open loop."""

from __future__ import annotations

import itertools
import statistics

import pytest

from loadtest.http.arrivals import poisson


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
