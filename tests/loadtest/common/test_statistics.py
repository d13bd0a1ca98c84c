# SPDX-License-Identifier: Apache-2.0
"""Quantiles and intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.common.statistics import mean, percentile, ratio


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share), abs=1e-6)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    source = np.random.default_rng(0)
    figures = [mean(source.normal(size=40).tolist()) for _ in range(100)]
    assert 86 <= sum(one.low <= 0 <= one.high for one in figures) <= 100


def test_pairs_are_drawn_together() -> None:
    # Samples differ by hundreds; the sides differ by 1 % everywhere, which unpaired draws would not see.
    base = [1.0, 10.0, 100.0, 500.0]
    found = ratio([1.01 * value for value in base], base)
    assert found[:3] == pytest.approx((1.01, 1.01, 1.01))
